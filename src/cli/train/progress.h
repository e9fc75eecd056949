#pragma once
// Progress line of a long task.

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

namespace shoal::cli {

// Redraws one line on a terminal; elsewhere prints a line every ten seconds. Silent for the first two seconds, so that
// short runs print nothing.
class Progress {
 public:
  // rate_unit: unit of `amount` in update(), such as "samples".
  Progress(bool enabled, int64_t steps, std::string rate_unit);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void update(int64_t step, int64_t amount, std::optional<double> loss = std::nullopt, const std::string& note = "");
  // Starts to print, on a rank that takes over.
  void enable() { enabled_ = true; }
  // Removes the progress line, so that another line can be printed; the next update redraws it.
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
