#include "launch/watcher.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/socket.h>
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

// Detaches the watcher from the terminal, signals and open files of the launcher; only the socket remains.
void separate(int& socket) {
  prctl(PR_SET_NAME, "shoal-watcher");
  setsid();
  sigset_t all;
  sigfillset(&all);
  sigprocmask(SIG_SETMASK, &all, nullptr);
  const int null = open("/dev/null", O_RDWR);
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) dup2(null, stream);
  constexpr int kept = STDERR_FILENO + 1;
  if (socket != kept) dup2(socket, kept);
  socket = kept;
  syscall(SYS_close_range, kept + 1, ~0U, 0);
}

// Reads the process groups until the launcher's end closes. A positive number adds a group, a negative one removes it.
std::set<pid_t> groups_at_the_end(int socket) {
  std::set<pid_t> groups;
  pid_t told = 0;
  while (true) {
    const auto count = read(socket, &told, sizeof told);
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

// A socket, because a write to a pipe whose reader was killed would end the launcher by SIGPIPE.
Watcher::Watcher(const std::string& job) : job_(job) {
  int fds[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds) != 0) {
    throw UsageError(fmt::format("cannot make a socket: {}", std::strerror(errno)));
  }
  pid_ = fork();
  if (pid_ == 0) {
    int socket = fds[0];
    separate(socket);
    for (const auto group : groups_at_the_end(socket)) kill(-group, SIGKILL);
    end_processes_of(job);
    _exit(0);
  }
  close(fds[0]);
  socket_ = fds[1];
  if (pid_ > 0) return;
  close(socket_);
  throw UsageError(fmt::format("cannot start a process: {}", std::strerror(errno)));
}

Watcher::~Watcher() {
  close(socket_);
  if (pid_ < 0) {
    end_processes_of(job_);
    return;
  }
  int status = 0;
  pid_t ended = 0;
  do {
    ended = waitpid(pid_, &status, 0);
  } while (ended < 0 && errno == EINTR);
  if (ended == pid_ && WIFSIGNALED(status)) end_processes_of(job_);
}

void Watcher::reap() {
  if (pid_ > 0 && waitpid(pid_, nullptr, WNOHANG) == pid_) pid_ = -1;
}

bool Watcher::add(pid_t group) const {
  return tell(group);
}

bool Watcher::remove(pid_t group) const {
  return tell(-group);
}

bool Watcher::tell(pid_t group) const {
  ssize_t sent = 0;
  do {
    sent = send(socket_, &group, sizeof group, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  return sent == sizeof group;
}

}  // namespace shoal
