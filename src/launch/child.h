#pragma once
// Process of one rank, from its launcher's view.

#include <sys/types.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "launch/line_pipe.h"

namespace shoal {

using Variables = std::vector<std::pair<std::string, std::string>>;

// What a rank runs: a command, or a function in a process forked from this one.
struct RankProgram {
  std::vector<std::string> command{};
  std::function<int()> body{};  // returns the exit code
};

struct Child {
  int rank = 0;
  pid_t pid = -1;
  bool running = false;
  bool stopped = false;  // by a signal, until it is continued
  bool failed = false;
  bool late = false;  // it was to join a job that has ended meanwhile
  std::vector<LinePipe> pipes{};
};

// Destinations of a rank's output, line by line; nullptr: it writes to our own streams.
struct Outlets {
  Outlet* out = nullptr;
  Outlet* err = nullptr;
};

// Starts the program with `variables` added to this process's environment, as the leader of its own process group, so
// that signals also reach its descendants. A body has none of this process's threads and open files, but the standard
// streams, and its process is called shoal-rank-N. The child dies with this process. With outlets its output comes
// through pipes. It cannot read the terminal, which would stop it (SIGTTIN): a terminal as standard input is replaced
// by an empty one, and reading /dev/tty fails. UsageError names a program that cannot be executed.
Child start_child(int rank, const RankProgram& program, const Variables& variables, const Outlets& outlets);

// "signal 9 (SIGKILL)".
std::string in_words(int signal);
// Of a status that waitpid() gave: "was killed by signal 9 (SIGKILL)"; and the exit code, 128 + number for a signal.
std::string describe_end(int status);
int exit_code(int status);

}  // namespace shoal
