#include "comm/backend/flight.h"

#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "comm/group/group_state.h"
#include "comm/rendezvous/world_state.h"
#include "shoal/error.h"

namespace shoal {

BackendFlight::BackendFlight(const Group& group, std::vector<Work> works, std::vector<at::Tensor> kept,
                             std::vector<std::function<void()>> finish)
    : group_(group),
      rings_bell_(group.transport() == "host"),
      works_(std::move(works)),
      kept_(std::move(kept)),
      finish_(std::move(finish)) {}

void BackendFlight::when_over(std::function<void()> callback) {
  {
    const std::lock_guard lock(mutex_);
    if (!over_) {
      callbacks_.push_back(std::move(callback));
      return;
    }
  }
  callback();
}

bool BackendFlight::settle(Milliseconds slice, bool to_the_end) {
  for (; settled_ < works_.size(); ++settled_) {
    auto& work = works_[settled_];
    if (slice.count() < 0 && !work.done()) return false;
    if (!(to_the_end ? work.wait_on(slice) : work.wait_for(std::max(slice, Milliseconds(0))))) return false;
    if (work.source() != any_source) source_ = work.source();
  }
  const c10::NoGradGuard no_grad;
  for (const auto& each : finish_) each();
  return true;
}

void BackendFlight::land(std::unique_lock<std::mutex> lock) {
  const auto works = std::exchange(works_, {});
  const auto kept = std::exchange(kept_, {});
  const auto finish = std::exchange(finish_, {});
  const auto callbacks = std::exchange(callbacks_, {});
  over_ = true;
  lock.unlock();
  for (const auto& callback : callbacks) callback();
}

bool BackendFlight::end_if_settled(Milliseconds slice) {
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (over_ || !lock) return over_;  // who holds the lock waits for the end
  try {
    if (!settle(slice, /*to_the_end=*/false)) return false;
  } catch (...) {
    error_ = std::current_exception();
  }
  land(std::move(lock));
  return true;
}

bool BackendFlight::look() {
  return end_if_settled(Milliseconds(-1));
}

bool BackendFlight::check() {
  return end_if_settled(Milliseconds(0));
}

void BackendFlight::wait(Milliseconds limit) {
  std::unique_lock lock(mutex_);
  const auto begin = Clock::now();
  const auto& while_waiting = state_of(group_)->world->options.while_waiting;
  while (!over_) {
    Milliseconds slice(100);
    if (limit.count() > 0) {
      // Without an overflow for limits that stand for "for ever".
      slice = std::min(slice, limit - std::chrono::floor<Milliseconds>(Clock::now() - begin));
      if (slice.count() <= 0) {
        throw CommError(
            fmt::format("an operation of group '{}' has not finished within {} s, the limit of this wait; it "
                        "goes on",
                        group_.name(), std::chrono::duration<double>(limit).count()));
      }
    }
    bool ended = true;
    try {
      ended = settle(slice, /*to_the_end=*/limit.count() <= 0);
    } catch (...) {
      error_ = std::current_exception();
    }
    if (ended) {
      land(std::move(lock));
      break;
    }
    if (!while_waiting) continue;
    lock.unlock();  // it may need an interpreter's lock, whose holder asks this flight
    while_waiting();
    lock.lock();
  }
  if (error_) std::rethrow_exception(error_);
}

}  // namespace shoal
