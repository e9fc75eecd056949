#pragma once
// Pipe for a rank's output, forwarded line by line with a prefix, so that ranks do not mix within a line.

#include <string>
#include <utility>

#include "launch/outlet.h"

namespace shoal {

// A line ends at "\n", "\r\n", or "\r" alone (a progress bar's). To bound memory, `most_pending` bytes without an end
// are forwarded as part of a line; where another rank writes before the next part, that one begins with the prefix,
// too.
class LinePipe {
 public:
  static constexpr size_t most_pending = 1 << 20;

  // fd: reading end of the pipe, owned. target: must outlive this object.
  LinePipe(int fd, Outlet& target, std::string prefix) : fd_(fd), target_(&target), prefix_(std::move(prefix)) {}

  int fd() const { return fd_; }
  bool open() const { return fd_ >= 0; }
  // Whether the target accepts more.
  bool ready() const { return open() && !target_->full(); }
  // Reads what is available; closes at the end of the stream.
  void pump();

 private:
  void take(const char* data, size_t size);
  void end_last_line();
  void forward(bool ends);

  int fd_;
  Outlet* target_;
  std::string prefix_;
  std::string pending_;        // unfinished line
  bool after_return_ = false;  // the last line ended with "\r", which may be followed by its "\n"
};

}  // namespace shoal
