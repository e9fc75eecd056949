#pragma once
// Steps that have failed on this rank, until they have ended on all ranks.

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

inline constexpr int no_backward = -1;

// Notes it for the calling thread, in the order in which backward has reached the steps. A repeated call does nothing.
// backward: autograd's number of the one in which it has failed.
void note_failed(FailedStep& step, int backward = no_backward);
// Call it when the step has ended, and before it is destroyed.
void forget_failed(FailedStep& step);
// Ends a step that is noted, and those that have failed in the same backward.
void end_failed_step(FailedStep& step);
// Ends those that this thread has noted.
void end_failed_steps();

}  // namespace shoal
