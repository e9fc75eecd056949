#pragma once
// Ends of other processes of this host, noticed at once.

#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "comm/rendezvous/host.h"
#include "comm/rendezvous/socket.h"

namespace shoal {

// A thread that sleeps until the kernel reports the end of one of the processes (pidfd). Where the kernel cannot report
// it, the thread looks into /proc every 100 ms. Thread-safe.
class PeerExit {
 public:
  // noticed: called by the thread after gone() has changed.
  PeerExit(const std::vector<ProcessId>& processes, std::function<void()> noticed);
  ~PeerExit();
  PeerExit(const PeerExit&) = delete;
  PeerExit& operator=(const PeerExit&) = delete;

  // Whether the process of this index has ended: proven by the kernel, and for good.
  bool gone(size_t index) const { return watched_[index].gone.load(); }
  // Kills the process, which gone() shows a moment later, unless it waits for a device. Whether it was sent the signal
  // for the first time.
  bool end(size_t index);

 private:
  struct Watched {
    ProcessId process;
    Descriptor descriptor;
    std::atomic<bool> gone = false;
    bool killed = false;
  };

  void run();

  std::vector<Watched> watched_;
  std::function<void()> noticed_;
  Descriptor stop_;  // readable once the thread must end
  std::thread thread_;
};

}  // namespace shoal
