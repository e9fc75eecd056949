#include "shoal/group.h"

#include "comm/group/pending_work.h"

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
  return !pending_ || take_if(pending_->wait_for(limit, /*to_the_end=*/false));
}

bool Work::wait_on(std::chrono::milliseconds slice) {
  return !pending_ || take_if(pending_->wait_for(slice, /*to_the_end=*/true));
}

bool Work::take_if(bool finished) {
  if (!finished) return false;
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
