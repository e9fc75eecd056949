#pragma once
// One rank's process as its launcher sees it.

#include <sys/types.h>

#include <string>
#include <utility>
#include <vector>

#include "launch/line_pipe.h"

namespace shoal {

using Variables = std::vector<std::pair<std::string, std::string>>;

struct Child {
  int rank = 0;
  pid_t pid = -1;
  bool running = false;
  bool stopped = false;  // by a signal, until it is continued
  std::vector<LinePipe> pipes{};
};

// Where what a rank prints goes, line by line; none: it writes to our own streams.
struct Outlets {
  Outlet* out = nullptr;
  Outlet* err = nullptr;
};

// Starts the command with `variables` added to this process's environment, as the leader of a process group of its own,
// so that signals reach what it starts, too. The child dies with this process. With outlets its output comes through
// pipes. It cannot read the terminal, which would stop it (SIGTTIN): standard input is empty if it is one, and reading
// /dev/tty fails. Throws UsageError that names the program when it cannot be executed.
Child start_child(int rank, const std::vector<std::string>& command, const Variables& variables,
                  const Outlets& outlets);

}  // namespace shoal
