#pragma once
// Queue of output for one of the launcher's own streams, whose reader may be slow, stuck or gone.

#include <string>
#include <string_view>

namespace shoal {

// Never blocks, so that signals and deadlines are handled whatever the reader does.
class Outlet {
 public:
  // fd: must stay open as long as this object.
  explicit Outlet(int fd);
  ~Outlet();
  Outlet(const Outlet&) = delete;
  Outlet& operator=(const Outlet&) = delete;

  // For poll().
  int fd() const { return fd_; }
  // Adds whole lines, or part of a writer's line. A line that another writer has not finished is ended first, so that
  // those of several ranks do not mix.
  void add(std::string_view text, int writer = nobody, bool ends = true);
  // Whether the writer has an unfinished line here.
  bool within_line_of(int writer) const { return unfinished_ == writer; }
  // Writes as much as the stream accepts now.
  void drain();
  bool empty() const { return waiting_.empty(); }
  // True if so much is queued that writers should wait.
  bool full() const { return waiting_.size() - written_ >= most_waiting; }
  // errno of a failed write, after which all output is dropped; 0: none.
  int error() const { return error_; }

 private:
  static constexpr size_t most_waiting = 1 << 20;
  static constexpr int nobody = -1;

  int own_;  // opened for this object; -1: none
  int fd_;
  std::string waiting_;
  size_t written_ = 0;  // bytes of `waiting_` that were written
  int error_ = 0;
  int unfinished_ = nobody;  // whose line is
};

// Whether two streams refer to the same file, pipe or terminal.
bool same_stream(int a, int b);

}  // namespace shoal
