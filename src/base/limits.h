#pragma once
// Limits for numbers from outside.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <limits>

namespace shoal {

// Ranks of a job: more than any machine has, few enough for a table of all ranks to be small.
constexpr int max_ranks = 100'000;
// Compute threads of a rank: more than the cores of any machine.
constexpr int max_threads = 1024;

// Longest wait: stands for "for ever" without an overflow of deadlines.
constexpr std::chrono::milliseconds longest_wait = std::chrono::hours(24 * 365 * 10);

// At most `longest_wait`, which infinity means, too.
inline std::chrono::milliseconds wait_of(double seconds) {
  constexpr std::chrono::duration<double> longest(longest_wait);
  return std::chrono::ceil<std::chrono::milliseconds>(std::min(longest, std::chrono::duration<double>(seconds)));
}

// The largest number of bytes stands for "no limit", which infinity means, too.
inline int64_t bytes_of_mebibytes(double mebibytes) {
  constexpr auto most = std::numeric_limits<int64_t>::max();
  const double bytes = std::ldexp(mebibytes, 20);
  return bytes < static_cast<double>(most) ? static_cast<int64_t>(bytes) : most;
}

}  // namespace shoal
