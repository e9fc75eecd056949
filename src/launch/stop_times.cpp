#include "launch/stop_times.h"

#include <csignal>

namespace shoal {
namespace {

// Nothing: never.
std::optional<Clock::time_point> after(double count) {
  constexpr double years = 1e8;  // a longer time would overflow the clock
  return count < years ? std::optional(Clock::now() + StopTimes::seconds(count)) : std::nullopt;
}

}  // namespace

Clock::duration StopTimes::seconds(double count) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(count));
}

void StopTimes::give(double seconds) {
  term_at_ = after(seconds);
}

void StopTimes::give_at_most(double seconds) {
  const auto end = after(seconds);
  if (!term_at_ || (end && *end < *term_at_)) term_at_ = end;
}

int StopTimes::due() {
  const auto now = Clock::now();
  if (kill_at_ && now > *kill_at_) return SIGKILL;
  if (!term_at_ || now < *term_at_ || kill_at_) return 0;
  kill_at_ = now + seconds(2);
  return SIGTERM;
}

}  // namespace shoal
