#pragma once
// Clock of a step's parts, in sampled steps.

#include <array>
#include <cstdint>
#include <optional>

#include "shoal/detail/clock.h"
#include "shoal/telemetry.h"

namespace shoal {

class StepClock {
 public:
  enum Event { forward_begins, forward_ends, backward_begins, first_leaves, backward_ends, all_back, events };

  // Costs a comparison in steps that are not sampled. A repeated mark overwrites the earlier one.
  void mark(Event event, int64_t step) {
    if (is_sampled(step)) times_[event] = Clock::now();
  }
  // finished: the step counts.
  void end_step(bool finished);
  void write_to(LoggingData& data) const;

 private:
  std::array<std::optional<Clock::time_point>, events> times_;
  int64_t steps_ = 0;
  StepTimes last_;
  StepTimes sum_;
};

}  // namespace shoal
