#pragma once
// Detection of other load on this host's cores.

#include <atomic>
#include <chrono>
#include <optional>
#include <string_view>

#include "shoal/detail/clock.h"

namespace shoal::shm {

// Looks at the number of threads of all programs that want to run, in /proc/loadavg. A rank that polls while another
// one waits for a core takes that core from it. Thread-safe.
class HostLoad {
 public:
  static constexpr auto interval = std::chrono::milliseconds(10);

  // Whether there were more of them than cores in the last two looks; looks again after an interval. False where the
  // system does not tell, and in a process that may not use all cores.
  bool crowded(Clock::time_point now);

 private:
  std::atomic<Clock::time_point::rep> next_look_ = 0;
  std::atomic<int> busy_looks_ = 0;  // in a row, at most 2
};

// Threads of all programs that run or could: 3 of "0.20 0.18 0.12 3/80 11206".
std::optional<int> runnable_threads(std::string_view loadavg);

}  // namespace shoal::shm
