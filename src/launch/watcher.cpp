#include "launch/watcher.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <set>

#include "launch/leftovers.h"
#include "shoal/error.h"

namespace shoal {
namespace {

// Detaches the watcher from the terminal, signals and open files of the launcher; only the pipe remains.
void separate(int& pipe) {
  prctl(PR_SET_NAME, "shoal-watcher");
  setsid();
  sigset_t all;
  sigfillset(&all);
  sigprocmask(SIG_SETMASK, &all, nullptr);
  const int null = open("/dev/null", O_RDWR);
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) dup2(null, stream);
  constexpr int kept = STDERR_FILENO + 1;
  if (pipe != kept) dup2(pipe, kept);
  pipe = kept;
  syscall(SYS_close_range, kept + 1, ~0U, 0);
}

// Reads the process groups until the pipe closes. A positive number adds a group, a negative one removes it.
std::set<pid_t> groups_at_the_end(int pipe) {
  std::set<pid_t> groups;
  pid_t told = 0;
  while (true) {
    const auto count = read(pipe, &told, sizeof told);
    if (count < 0 && errno == EINTR) continue;
    if (count != sizeof told) return groups;
    if (told > 0) {
      groups.insert(told);
    } else {
      groups.erase(-told);
    }
  }
}

}  // namespace

Watcher::Watcher(const std::string& job) {
  int fds[2];
  if (pipe2(fds, O_CLOEXEC) != 0) throw UsageError(fmt::format("cannot make a pipe: {}", std::strerror(errno)));
  pid_ = fork();
  if (pid_ == 0) {
    int pipe = fds[0];
    separate(pipe);
    for (const auto group : groups_at_the_end(pipe)) kill(-group, SIGKILL);
    end_processes_of(job);
    _exit(0);
  }
  close(fds[0]);
  pipe_ = fds[1];
  if (pid_ > 0) return;
  close(pipe_);
  throw UsageError(fmt::format("cannot start a process: {}", std::strerror(errno)));
}

Watcher::~Watcher() {
  close(pipe_);
  while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) continue;
}

void Watcher::add(pid_t group) const {
  tell(group);
}

void Watcher::remove(pid_t group) const {
  tell(-group);
}

// Atomic, because it is smaller than PIPE_BUF. Without a watcher, the launcher still ends what it can.
void Watcher::tell(pid_t group) const {
  while (write(pipe_, &group, sizeof group) < 0 && errno == EINTR) continue;
}

}  // namespace shoal
