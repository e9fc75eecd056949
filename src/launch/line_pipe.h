#pragma once
// Output of a rank, forwarded line by line with a prefix, so that ranks do not mix within a line.

#include <string>
#include <utility>

#include "launch/outlet.h"

namespace shoal {

// A line ends at "\n", "\r\n" or "\r" alone (a progress bar's). What has grown beyond `most_pending` bytes without an
// end is forwarded as it is, so that memory stays bounded.
class LinePipe {
 public:
  static constexpr size_t most_pending = 1 << 16;

  // fd: the pipe's end to read from, owned; target: outlives this.
  LinePipe(int fd, Outlet& target, std::string prefix) : fd_(fd), target_(&target), prefix_(std::move(prefix)) {}

  int fd() const { return fd_; }
  bool open() const { return fd_ >= 0; }
  // Whether the target takes more.
  bool ready() const { return open() && !target_->full(); }
  // Reads what is there; closes at the end of the stream.
  void pump();

 private:
  void take(const char* data, size_t size);
  void end_last_line();

  int fd_;
  Outlet* target_;
  std::string prefix_;
  std::string pending_;        // of the line that has not ended
  bool within_line_ = false;   // its beginning has been written
  bool after_return_ = false;  // the last line ended with "\r", whose "\n" may follow
};

}  // namespace shoal
