#pragma once
// Errors: all that the library throws.

#include <stdexcept>
#include <string>

namespace shoal {

// The library's exceptions. Each message names the thing at fault and what to do about it.

// Base of all errors that shoal throws on purpose. Anything else that escapes is a broken invariant.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The caller's mistake: a wrong option, call order or input. The state is as before the call.
class UsageError : public Error {
 public:
  using Error::Error;
};

// Ranks disagree about something that must be equal. Thrown on every rank; names the first difference and two ranks.
class DisagreeError : public Error {
 public:
  using Error::Error;
};

// A peer is dead, stopped, late or unreachable; the group it belongs to is unusable afterwards.
class CommError : public Error {
 public:
  explicit CommError(const std::string& message, int rank = -1) : Error(message), rank_(rank) {}
  // The rank at fault, in the numbering of the group whose operation failed; -1 where it is not known.
  int rank() const { return rank_; }

 private:
  int rank_;
};

// A step was given up on some rank, and therefore on all: its gradients are valid on none of them. The ranks are in
// step again and may go on with the next one after zero_grad().
class StepAbandoned : public Error {
 public:
  using Error::Error;
};

// A rank of a Join scope that stops early has no batch left. Thrown on every rank, before the step: the ranks are in
// step, and the model is as the last one left it.
class InputsExhausted : public Error {
 public:
  using Error::Error;
};

// The error of whatever saves or loads.

// A checkpoint could not be written or read: no space, no permission, a damaged file, another job that saves to the
// same place. Names the file and the reason. Where ranks save together it is thrown on every rank and names the rank at
// fault; the older checkpoints are as before, the ranks are in step and may go on training.
class CheckpointError : public Error {
 public:
  using Error::Error;
};

}  // namespace shoal
