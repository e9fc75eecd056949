#pragma once
// The library's exceptions. Each message names the thing at fault and what to do about it.

#include <stdexcept>
#include <string>

namespace shoal {

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

}  // namespace shoal
