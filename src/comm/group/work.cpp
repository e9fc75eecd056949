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
  pending_.reset();
}

bool Work::done() {
  return !pending_ || pending_->done();
}

}  // namespace shoal
