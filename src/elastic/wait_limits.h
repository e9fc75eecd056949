#pragma once
// Limits of waits for ranks that are late.

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace shoal {

struct WaitLimits {
  using Milliseconds = std::chrono::milliseconds;

  Milliseconds longest{};   // for a late rank; 0: the world's limit
  double step_seconds = 0;  // the longest complete step so far

  bool has_limit() const { return longest.count() > 0; }
  void complete_step(std::chrono::duration<double> step) { step_seconds = std::max(step_seconds, step.count()); }
  // A rank was late, and may only be slow. At the world's limit the job is lost; before, a rank must have been killed.
  void lengthen(Milliseconds world_limit) { longest = std::max(longest, std::min(2 * longest, 2 * world_limit / 5)); }
  // For a newcomer: the time of two steps, and `more`.
  Milliseconds for_newcomers(Milliseconds more) const {
    return more + Milliseconds(static_cast<int64_t>(2000 * step_seconds));
  }
};

}  // namespace shoal
