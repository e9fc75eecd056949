#include "base/without_sigpipe.h"

#include <pthread.h>

#include <cerrno>
#include <ctime>

namespace shoal {
namespace {

sigset_t sigpipe() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGPIPE);
  return set;
}

bool is_pending() {
  sigset_t pending;
  sigpending(&pending);
  return sigismember(&pending, SIGPIPE) == 1;
}

}  // namespace

WithoutSigpipe::WithoutSigpipe() : was_pending_(is_pending()) {
  const auto set = sigpipe();
  pthread_sigmask(SIG_BLOCK, &set, &before_);
}

WithoutSigpipe::~WithoutSigpipe() {
  const int error = errno;
  if (!was_pending_ && is_pending()) {
    const auto set = sigpipe();
    const timespec at_once{};
    while (sigtimedwait(&set, nullptr, &at_once) < 0 && errno == EINTR) continue;
  }
  pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  errno = error;
}

}  // namespace shoal
