#pragma once
// Output of a rank, forwarded line by line with a prefix, so that ranks do not mix within a line.

#include <string>

namespace shoal {

// A line ends at "\n", "\r\n" or "\r" alone (a progress bar's). What has grown beyond `most_pending` bytes without an end
// is forwarded as it is, so that memory stays bounded.
class LinePipe {
 public:
  static constexpr size_t most_pending = 1 << 16;

  // fd: the pipe's end to read from, owned; target: the stream to write to.
  LinePipe(int fd, int target, std::string prefix) : fd_(fd), target_(target), prefix_(std::move(prefix)) {}

  int fd() const { return fd_; }
  bool open() const { return fd_ >= 0; }
  // Reads what is there; closes at the end of the stream.
  void pump();

 private:
  void take(const char* data, size_t size);
  void write_lines();
  void end_last_line();

  int fd_;
  int target_;
  std::string prefix_;
  std::string pending_;         // of the line that has not ended
  std::string out_;             // lines on their way to the target
  bool within_line_ = false;    // its beginning has been written
  bool after_return_ = false;   // the last line ended with "\r", whose "\n" may follow
};

}  // namespace shoal
