#include "shoal/group.h"

#include "comm/group/group_state.h"

namespace shoal {

Work::Work() = default;
Work::Work(std::unique_ptr<PendingWork> pending) : pending_(std::move(pending)) {}
Work::Work(Work&&) noexcept = default;
Work& Work::operator=(Work&&) noexcept = default;
Work::~Work() = default;

void Work::wait() {
  if (!pending_) return;
  pending_->wait();
  source_ = pending_->source();
  pending_.reset();
}

bool Work::wait_for(std::chrono::milliseconds limit) {
  if (!pending_) return true;
  if (!pending_->wait_for(limit)) return false;
  source_ = pending_->source();
  pending_.reset();
  return true;
}

int Work::source() const {
  return source_;
}

bool Work::done() {
  return !pending_ || pending_->done();
}

}  // namespace shoal
