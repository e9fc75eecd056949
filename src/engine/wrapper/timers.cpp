#include "shoal/telemetry.h"

#include <fmt/format.h>

#include <algorithm>
#include <ostream>

#include "shoal/error.h"

namespace shoal {

void TimersOptions::validate() const {
  if (level < 0 || level > 2) throw UsageError(fmt::format("Timers: level {}: give 0, 1 or 2", level));
}

Timers::Timers(const TimersOptions& options) : options_(options) {
  options.validate();
}

std::vector<Timing> Timers::result() const {
  const std::lock_guard lock(mutex_);
  return timings_;
}

void Timers::reset() {
  const std::lock_guard lock(mutex_);
  timings_.clear();
}

void Timers::add(const std::string& name, double seconds) {
  const std::lock_guard lock(mutex_);
  auto timing = std::find_if(timings_.begin(), timings_.end(), [&](const Timing& one) { return one.name == name; });
  if (timing == timings_.end()) timing = timings_.insert(timing, {.name = name});
  ++timing->count;
  timing->total_s += seconds;
  timing->max_s = std::max(timing->max_s, seconds);
}

std::ostream& operator<<(std::ostream& out, const Timers& timers) {
  out << fmt::format("{:<36}{:>10}{:>14}{:>14}\n", "", "count", "total, ms", "longest, ms");
  for (const auto& timing : timers.result()) {
    out << fmt::format("{:<36}{:>10}{:>14.3f}{:>14.3f}\n", timing.name, timing.count, 1e3 * timing.total_s,
                       1e3 * timing.max_s);
  }
  return out;
}

}  // namespace shoal
