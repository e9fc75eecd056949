#include "cli/train/counters.h"

#include <sys/resource.h>

namespace shoal::cli {
namespace {

double milliseconds(const timeval& time) {
  return 1e3 * static_cast<double>(time.tv_sec) + 1e-3 * static_cast<double>(time.tv_usec);
}

}  // namespace

Counters Counters::operator-(const Counters& earlier) const {
  return {.page_faults = page_faults - earlier.page_faults,
          .user_ms = user_ms - earlier.user_ms,
          .system_ms = system_ms - earlier.system_ms,
          .sleeps = sleeps - earlier.sleeps,
          .preemptions = preemptions - earlier.preemptions};
}

Counters process_counters() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return {.page_faults = usage.ru_minflt,
          .user_ms = milliseconds(usage.ru_utime),
          .system_ms = milliseconds(usage.ru_stime),
          .sleeps = usage.ru_nvcsw,
          .preemptions = usage.ru_nivcsw};
}

}  // namespace shoal::cli
