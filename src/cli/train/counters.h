#pragma once
// Counters of this process since its start, as the kernel keeps them.

#include <cstdint>

namespace shoal::cli {

struct Counters {
  int64_t page_faults = 0;  // served without a disk
  double user_ms = 0;       // processor time of all threads
  double system_ms = 0;
  int64_t sleeps = 0;       // times that a thread waited in the kernel
  int64_t preemptions = 0;  // times that the scheduler took the processor from a thread

  Counters operator-(const Counters& earlier) const;
};

Counters process_counters();

}  // namespace shoal::cli
