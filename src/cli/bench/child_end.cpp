#include "cli/bench/child_end.h"

#include <poll.h>
#include <sys/wait.h>

#include <csignal>

namespace shoal::cli {

std::optional<int> wait_for_end(pid_t program, Signals& signals) {
  bool stops = false;
  int status = 0;
  while (waitpid(program, &status, WNOHANG) != program) {
    pollfd changed{.fd = signals.fd(), .events = POLLIN, .revents = 0};
    poll(&changed, 1, /*timeout=*/-1);
    if (signals.asked().to_stop == 0) continue;
    kill(-program, stops ? SIGKILL : SIGTERM);
    stops = true;
  }
  return stops ? std::nullopt : std::optional(status);
}

}  // namespace shoal::cli
