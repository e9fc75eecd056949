#pragma once
// Time that a process has waited.

#include <algorithm>
#include <chrono>

#include "shoal/detail/clock.h"

namespace shoal {

// A pause in which the process stood still itself, because it was stopped or the host asleep, counts as a moment:
// otherwise the first one to wake up would take all others for late.
class Patience {
 public:
  // limit 0: it never ends. longest: what counts of a pause; over() is to be asked more often.
  explicit Patience(std::chrono::milliseconds limit, std::chrono::milliseconds longest = std::chrono::milliseconds(250))
      : limit_(limit), longest_(longest) {}

  void restart() { *this = Patience(limit_, longest_); }
  // Whether it has ended, `more` ago.
  bool over(std::chrono::milliseconds more = {}) {
    const auto now = Clock::now();
    waited_ += std::min<Clock::duration>(now - seen_, longest_);
    seen_ = now;
    return limit_.count() > 0 && waited_ > limit_ + more;
  }

 private:
  std::chrono::milliseconds limit_;
  std::chrono::milliseconds longest_;
  Clock::duration waited_{};
  Clock::time_point seen_ = Clock::now();
};

// Who kills those that are late: the present ones, one after the other, as the first may be stopped by now.
inline std::chrono::milliseconds turn_to_kill(size_t place) {
  return std::chrono::milliseconds(300) * place;
}

}  // namespace shoal
