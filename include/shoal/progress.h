#pragma once
// Progress bar of a loop.

#include <cstdint>
#include <string>

#include "shoal/detail/clock.h"
#include "shoal/world.h"

namespace shoal {

struct ProgressBarOptions {
  bool enabled = true;
  std::string unit = "it";  // of the rate: "samples"
  double unit_scale = 1;    // units per step: samples of all ranks in a step
};

// Line on standard error with the part that is done, the rate, and the time that is left, after tqdm. On a terminal it
// is one line that is redrawn; elsewhere (a file, a pipe) it is a plain line every ten seconds and at
// the end. Silent for the first two seconds, so that short loops print nothing. Gone when it is destroyed.
//
//   shoal::ProgressBar bar(world, steps);  // prints on rank 0 only
//   for (int64_t step = 0; step < steps; ++step) {
//     ...
//     bar.update(1, "loss " + std::to_string(loss));
//   }
//
// Not collective. Not thread-safe.
class ProgressBar {
 public:
  // total: number of steps.
  explicit ProgressBar(int64_t total, const ProgressBarOptions& options = {});
  // Enabled on rank 0, unless the options disable it.
  ProgressBar(const World& world, int64_t total, const ProgressBarOptions& options = {});
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  // So many more steps are done. `note`: what to show beside the rate.
  void update(int64_t steps = 1, const std::string& note = "");
  // From now on it prints: for a rank that takes over.
  void enable(bool enabled = true) { options_.enabled = enabled; }
  // Removes the line, so that others can be printed; the next update() draws it again.
  void clear();

 private:
  std::string text(const std::string& note, Clock::time_point now) const;

  ProgressBarOptions options_;
  bool terminal_;
  bool drawn_ = false;
  int64_t total_;
  int64_t done_ = 0;
  Clock::time_point start_ = Clock::now();
  Clock::time_point last_ = start_;
};

}  // namespace shoal
