#pragma once
// Progress line of a long task.

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

namespace shoal::cli {

// On a terminal, one line that is redrawn; elsewhere, a plain line every ten seconds. Silent for the first two seconds,
// so that short runs print nothing.
class Progress {
 public:
  // rate_unit: what `amount` of update() counts, "samples".
  Progress(bool enabled, int64_t steps, std::string rate_unit);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void update(int64_t step, int64_t amount, std::optional<double> loss = std::nullopt, const std::string& note = "");
  // From now on, by a rank that takes over.
  void enable() { enabled_ = true; }
  // Removes the bar, so that a line can be printed; the next update draws it again.
  void clear();

 private:
  using Clock = std::chrono::steady_clock;

  bool enabled_;
  bool terminal_;
  bool drawn_ = false;
  int64_t steps_;
  std::string unit_;
  double loss_ = 0;  // smoothed
  Clock::time_point start_ = Clock::now();
  Clock::time_point last_ = start_;
};

}  // namespace shoal::cli
