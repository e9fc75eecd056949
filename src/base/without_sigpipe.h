#pragma once
// Writes to connections that the other side has closed, in libraries that do not say MSG_NOSIGNAL.

#include <csignal>

namespace shoal {

// Blocks SIGPIPE in this thread while it lives, and in threads that are started meanwhile for as long as those live:
// what they write fails with EPIPE. The signal's default action would end the process before it can name the rank that
// is gone. Leaves the process's own handling of SIGPIPE alone.
class WithoutSigpipe {
 public:
  WithoutSigpipe();
  ~WithoutSigpipe();
  WithoutSigpipe(const WithoutSigpipe&) = delete;
  WithoutSigpipe& operator=(const WithoutSigpipe&) = delete;

 private:
  sigset_t before_;
  bool was_pending_;
};

}  // namespace shoal
