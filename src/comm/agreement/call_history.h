#pragma once
// History of the collectives that this rank has entered in a group: their number, and the last ones.

#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

#include "comm/agreement/fingerprint.h"

namespace shoal {

// Thread-safe.
class CallHistory {
 public:
  // keeps: also stores the last calls, which transports that compare calls themselves do not need.
  explicit CallHistory(bool keeps) : keeps_(keeps) {}

  // Adds a call; returns its number, from 0.
  uint64_t enter(const Call& call) {
    const std::lock_guard lock(mutex_);
    if (keeps_) {
      last_.push_back(fingerprint_of(call, entered_));
      if (last_.size() > most) last_.pop_front();
    }
    return entered_++;
  }
  // Removes the last call, which was not issued after all.
  void take_back() {
    const std::lock_guard lock(mutex_);
    if (!last_.empty()) last_.pop_back();
    --entered_;
  }
  uint64_t entered() const {
    const std::lock_guard lock(mutex_);
    return entered_;
  }
  bool keeps() const { return keeps_; }
  // The last calls, in order.
  std::vector<Fingerprint> last() const {
    const std::lock_guard lock(mutex_);
    return {last_.begin(), last_.end()};
  }

  static constexpr size_t most = 64;

 private:
  const bool keeps_;
  mutable std::mutex mutex_;
  uint64_t entered_ = 0;
  std::deque<Fingerprint> last_;
};

}  // namespace shoal
