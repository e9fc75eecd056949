#pragma once
// Exceptions that the library throws.

#include <stdexcept>
#include <string>

namespace shoal {

// Base class of all exceptions that shoal throws. A message says what happened, where, and what to do. Exceptions of
// the program's own code (module, loss, hooks) and of PyTorch pass through unchanged.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A mistake of the caller: an invalid option, call order or input. Unless the function says otherwise, the call has
// changed nothing.
class UsageError : public Error {
 public:
  using Error::Error;
};

// A value that must be equal on all ranks differs. Thrown on every rank; the message names the first difference and two
// of the ranks.
class DisagreeError : public Error {
 public:
  using Error::Error;
};

// A failed communication: a peer is dead, stopped, too late or unreachable. The group can no longer be used.
class CommError : public Error {
 public:
  explicit CommError(const std::string& message, int rank = -1) : Error(message), rank_(rank) {}
  // Rank of the failed peer within the group whose operation failed; -1 if it is unknown.
  int rank() const { return rank_; }

 private:
  int rank_;
};

// An elastic job that cannot go on: too few ranks are left, for example. The message says why. Thrown on every rank
// that lives. Not a CommError, so that a loop which recovers from those does not try for ever.
class JobLost : public Error {
 public:
  using Error::Error;
};

// A step that failed on one rank and was therefore abandoned on all of them. No rank has valid gradients. All ranks are
// at the same step again: call zero_grad() and continue with the next one.
class StepAbandoned : public Error {
 public:
  using Error::Error;
};

// Thrown on every rank of a Join scope with throw_on_early_termination as soon as one rank has no batch left. It is
// thrown before the step, so all ranks are at the same step and the model is the result of the previous one.
class InputsExhausted : public Error {
 public:
  using Error::Error;
};

// A checkpoint that cannot be written or read: the disk is full, a permission is missing, a file is damaged, or another
// job saves to the same place. The message names the file and the reason. In a collective save it is thrown on every
// rank and names the rank at fault. Older checkpoints are unchanged, and training can continue.
class CheckpointError : public Error {
 public:
  using Error::Error;
};

}  // namespace shoal
