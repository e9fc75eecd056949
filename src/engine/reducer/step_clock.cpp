#include "engine/reducer/step_clock.h"

#include <algorithm>
#include <utility>

namespace shoal {

void StepClock::end_step(bool finished) {
  const auto times = std::exchange(times_, {});
  if (!finished || !times[all_back] || !times[first_leaves]) return;
  const auto between = [&](Event begin, Event end) {
    if (!times[begin] || !times[end]) return 0.0;
    return std::max(0.0, std::chrono::duration<double, std::milli>(*times[end] - *times[begin]).count());
  };
  last_ = {.forward = between(forward_begins, forward_ends),
           .backward = between(backward_begins, backward_ends),
           .communication = between(first_leaves, all_back),
           .overlap = between(first_leaves, backward_ends)};
  for (auto part : {&StepTimes::forward, &StepTimes::backward, &StepTimes::communication, &StepTimes::overlap}) {
    sum_.*part += last_.*part;
  }
  ++steps_;
}

void StepClock::write_to(LoggingData& data) const {
  data.sampled_steps += steps_;
  for (auto part : {&StepTimes::forward, &StepTimes::backward, &StepTimes::communication, &StepTimes::overlap}) {
    data.last.*part += last_.*part;
    data.mean.*part += steps_ > 0 ? sum_.*part / static_cast<double>(steps_) : 0;
  }
}

}  // namespace shoal
