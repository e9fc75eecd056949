#pragma once
// Operations in flight that finish together: one call of c10d.

#include <atomic>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <vector>

#include "comm/transport/transport.h"
#include "shoal/group.h"

namespace shoal {

// Thread-safe. Outlives its handle, so that a handle may be dropped. No tensor is released and no callback runs under
// its lock or a transport's, because both may need an interpreter's lock whose holder waits for this one.
class BackendFlight {
 public:
  // kept: tensors that live until the operations have ended. finish: runs after the operations, before the flight is
  // over (copies into tensors of other strides).
  BackendFlight(const Group& group, std::vector<Work> works, std::vector<at::Tensor> kept,
                std::vector<std::function<void()>> finish);
  BackendFlight(const BackendFlight&) = delete;
  BackendFlight& operator=(const BackendFlight&) = delete;

  // Runs once the flight is over; at once if it is. Its thread is any that sees the end.
  void when_over(std::function<void()> callback);

  // Whether somebody depends on the end without waiting for it.
  bool urgent() const { return urgent_; }
  void set_urgent() { urgent_ = true; }
  // Whether peers wake this process when they have done their part.
  bool rings_bell() const { return rings_bell_; }

  bool over() const { return over_; }
  // For a flight that is over: why it failed, if it did.
  std::exception_ptr error() const { return over_ ? error_ : nullptr; }
  int source() const { return over_ ? source_ : any_source; }

  // Ends the flight if its operations have ended; does not wait. True if it is over.
  bool look();
  // As look(), and checks that the other ranks are alive and not too late.
  bool check();
  // Waits for the end, and throws the flight's error. limit: zero or less: the operations' own. A wait that reaches its
  // limit throws CommError; the operations go on.
  void wait(Milliseconds limit);

 private:
  bool end_if_settled(Milliseconds slice);
  // Under the lock: true if the operations have ended, each having been waited for `slice` at most. Negative: asks them
  // alone.
  bool settle(Milliseconds slice, bool to_the_end);
  // Marks the end; releases the lock before tensors and callbacks.
  void land(std::unique_lock<std::mutex> lock);

  const Group group_;
  const bool rings_bell_;
  std::atomic<bool> urgent_ = false;
  std::mutex mutex_;  // guards what follows, but for the atomic flag, after which error_ and source_ do not change
  std::vector<Work> works_;
  std::vector<at::Tensor> kept_;
  std::vector<std::function<void()>> finish_;
  std::vector<std::function<void()>> callbacks_;
  size_t settled_ = 0;
  std::exception_ptr error_;
  int source_ = any_source;
  std::atomic<bool> over_ = false;
};

}  // namespace shoal
