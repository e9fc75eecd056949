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

// Notes it for the calling thread, in the order in which backward has reached the steps. A repeated call does nothing.
void note_failed(FailedStep& step);
// Call it when the step has ended, and before it is destroyed.
void forget_failed(FailedStep& step);
// Ends those that this thread has noted, and with `step` those of the thread that has noted it: the program may handle
// an exception in another thread.
void end_failed_steps(const FailedStep* step = nullptr);

}  // namespace shoal
