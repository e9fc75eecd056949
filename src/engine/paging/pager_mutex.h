#pragma once
// Mutex of a Pager, which waits for other ranks while it holds it.

#include <atomic>
#include <mutex>
#include <thread>

#include "shoal/error.h"

namespace shoal {

// A thread that comes again runs a signal handler in such a wait (WorldOptions::while_waiting), and would wait for
// itself.
class PagerMutex {
 public:
  void lock() {
    if (owner_ == std::this_thread::get_id()) {
      throw UsageError(
          "a signal handler used parameters of a FullyShardedDataParallel while this rank exchanged parameters with "
          "others: let the handler set a flag, and look at it between steps");
    }
    mutex_.lock();
    owner_ = std::this_thread::get_id();
  }
  void unlock() {
    owner_ = std::thread::id();
    mutex_.unlock();
  }

 private:
  std::mutex mutex_;
  std::atomic<std::thread::id> owner_{};
};

}  // namespace shoal
