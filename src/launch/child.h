#pragma once
// One rank's process as its launcher sees it.

#include <sys/types.h>

#include <string>
#include <utility>
#include <vector>

namespace shoal {

using Variables = std::vector<std::pair<std::string, std::string>>;

// Forwards what arrives through a pipe to a stream, line by line with a prefix, so that ranks do not mix within a line.
class LinePipe {
 public:
  LinePipe(int fd, int target, std::string prefix) : fd_(fd), target_(target), prefix_(std::move(prefix)) {}

  int fd() const { return fd_; }
  bool open() const { return fd_ >= 0; }
  // Reads what is there; closes at the end of the stream.
  void pump();

 private:
  void write_lines(bool all);

  int fd_;
  int target_;
  std::string prefix_;
  std::string pending_;
};

struct Child {
  int rank = 0;
  pid_t pid = -1;
  bool running = false;
  std::vector<LinePipe> pipes;
};

// Starts the command with `variables` added to this process's environment, as the leader of a process group of its own,
// so that signals reach what it starts, too. The child dies with this process. With `prefix` its output comes through
// pipes. Throws UsageError that names the program when it cannot be executed.
Child start_child(int rank, const std::vector<std::string>& command, const Variables& variables, bool prefix);

}  // namespace shoal
