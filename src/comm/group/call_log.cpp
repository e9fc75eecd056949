#include "shoal/call_log.h"

namespace shoal {

size_t CallLog::add(const CallRecord& record) {
  const std::lock_guard lock(mutex_);
  records_.push_back(record);
  return cleared_ + records_.size() - 1;
}

void CallLog::finish(size_t index) {
  const std::lock_guard lock(mutex_);
  if (index >= cleared_) records_[index - cleared_].finished = Clock::now();
}

std::vector<CallRecord> CallLog::records() const {
  const std::lock_guard lock(mutex_);
  return records_;
}

int64_t CallLog::count(Op op) const {
  const std::lock_guard lock(mutex_);
  int64_t count = 0;
  for (const auto& record : records_) count += record.op == op ? 1 : 0;
  return count;
}

int64_t CallLog::bytes(Op op) const {
  const std::lock_guard lock(mutex_);
  int64_t bytes = 0;
  for (const auto& record : records_) bytes += record.op == op ? record.bytes : 0;
  return bytes;
}

void CallLog::clear() {
  const std::lock_guard lock(mutex_);
  cleared_ += records_.size();
  records_.clear();
}

}  // namespace shoal
