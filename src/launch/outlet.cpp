#include "launch/outlet.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/stat.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>

namespace shoal {
namespace {

// The same terminal in an open file of its own; -1: `fd` is none, or it cannot be opened. A write to a terminal that
// does not read blocks although poll() has said that it is ready, and O_NONBLOCK at `fd` would be that of all processes
// that share it.
int open_again(int fd) {
  if (isatty(fd) == 0) return -1;
  const int flags = O_WRONLY | O_NOCTTY | O_NONBLOCK | O_CLOEXEC;
  const int again = open(fmt::format("/proc/self/fd/{}", fd).c_str(), flags);
  const bool controls = tcgetsid(fd) >= 0;  // then it may be opened even where it is another user's, as after su
  return again < 0 && controls ? open("/dev/tty", flags) : again;
}

}  // namespace

Outlet::Outlet(int fd) : own_(open_again(fd)), fd_(own_ >= 0 ? own_ : fd) {}

Outlet::~Outlet() {
  if (own_ >= 0) close(own_);
}

void Outlet::add(std::string_view text, int writer, bool ends) {
  if (error_ == 0) {
    if (unfinished_ != nobody && unfinished_ != writer) waiting_ += '\n';
    waiting_ += text;
  }
  unfinished_ = ends ? nobody : writer;
}

void Outlet::drain() {
  while (written_ < waiting_.size()) {
    pollfd room{fd_, POLLOUT, 0};
    if (poll(&room, 1, 0) != 1) break;
    // A pipe that is ready accepts at least PIPE_BUF bytes, and a terminal that was opened again what it has room for.
    const auto count = write(fd_, waiting_.data() + written_, std::min<size_t>(PIPE_BUF, waiting_.size() - written_));
    if (count >= 0) {
      written_ += static_cast<size_t>(count);
      continue;
    }
    if (errno == EINTR || errno == EAGAIN) break;
    error_ = errno;
    written_ = waiting_.size();
  }
  constexpr size_t worth_moving = 1 << 16;
  if (written_ < waiting_.size() && written_ < worth_moving) return;
  waiting_.erase(0, written_);
  written_ = 0;
}

bool same_stream(int a, int b) {
  struct stat first {};
  struct stat second {};
  return fstat(a, &first) == 0 && fstat(b, &second) == 0 && first.st_dev == second.st_dev &&
         first.st_ino == second.st_ino;
}

}  // namespace shoal
