#pragma once
// Signals received by a launcher.

#include <csignal>

namespace shoal {

// SIGINT, SIGTERM, SIGHUP and SIGTSTP (unless they are ignored, as by nohup), SIGUSR1, SIGUSR2 and SIGCHLD as a
// descriptor to poll; the destructor restores the former handling. Use it on one thread, before there are others.
class Signals {
 public:
  Signals();
  ~Signals();
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

  int fd() const { return fd_; }
  // Requests since the last call.
  struct Asked {
    bool to_stop = false;  // SIGINT or SIGTERM
    bool hung_up = false;
    bool to_suspend = false;
    bool who_waits = false;
    bool more = false;  // at least once: the system does not count signals that come together
  };
  Asked asked();
  // Stops this process, as SIGTSTP does by default, until it is continued. Does nothing where no shell could continue
  // it.
  void suspend();

 private:
  sigset_t set_{};
  sigset_t before_{};
  struct sigaction child_before_ {};
  int fd_ = -1;
};

}  // namespace shoal
