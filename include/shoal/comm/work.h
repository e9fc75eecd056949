#pragma once
// A handle on an operation in flight.

#include <memory>

namespace shoal {

class PendingWork;

// Move-only. Owns the operation's tensors until it is finished, so the caller may drop its own handles at once.
// A default-constructed Work is finished. Dropping an unfinished Work waits for it, so that memory which the caller owns
// may go; an error of the operation is then said by the next call on the group (CommError). While an exception is on its
// way nothing is waited for: the group keeps the tensors and the operation goes on. Not thread-safe; one thread waits.
class [[nodiscard]] Work {
 public:
  Work();
  explicit Work(std::unique_ptr<PendingWork> pending);
  Work(Work&&) noexcept;
  Work& operator=(Work&&) noexcept;
  ~Work();

  // Blocks until the operation is finished on this rank. Throws CommError that names the rank at fault, the operation,
  // its number in the group, its step and bucket, when a peer is dead, stopped or later than the world's deadline.
  // Waiting again on a finished Work returns at once.
  void wait();

  // True when wait() would not block.
  bool done();

 private:
  std::unique_ptr<PendingWork> pending_;
};

}  // namespace shoal
