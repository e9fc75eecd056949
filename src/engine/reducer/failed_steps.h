#pragma once
// Steps that have failed on this rank, until they have ended on all ranks.

#include <optional>

#include "engine/gradients/backward_tracker.h"

namespace shoal {

class FailedStep {
 public:
  // Sends what the other ranks still expect. Steps that have failed in one backward all do so before the first of them
  // ends: the other ranks end theirs in that order.
  virtual void send_rest() = 0;
  // Collective with the other ranks' step.
  virtual void end() = 0;

 protected:
  ~FailedStep() = default;
};

// Notes it for the calling thread. A step that is noted is noted anew if it fails again in a later backward.
// where: nothing for a step that has failed before its backward.
void note_failed(FailedStep& step, const std::optional<BackwardPlace>& where = std::nullopt);
// Call it when the step has ended, and before it is destroyed.
void forget_failed(FailedStep& step);
// Ends a step that is noted, and those that have failed in the same backward. Before it those of backwards that this
// thread has run before: the other ranks are in these now, or are past them.
void end_failed_step(FailedStep& step);
// Ends those that this thread has noted.
void end_failed_steps();

}  // namespace shoal
