#pragma once
// Output on its way to one of the launcher's own streams, whose reader may be slow, stuck or gone.

#include <string>
#include <string_view>

namespace shoal {

// Never blocks, so that signals and deadlines are kept whoever reads.
class Outlet {
 public:
  explicit Outlet(int fd) : fd_(fd) {}

  int fd() const { return fd_; }
  // Whole lines, so that those of several ranks do not mix.
  void add(std::string_view text);
  // Writes as much as the stream takes now.
  void drain();
  bool empty() const { return waiting_.empty(); }
  // So much is waiting that whoever adds should wait, too.
  bool full() const { return waiting_.size() - written_ >= most_waiting; }
  // Why a write has failed, as errno; what is added from then on is dropped. 0: none has.
  int error() const { return error_; }

 private:
  static constexpr size_t most_waiting = 1 << 20;

  int fd_;
  std::string waiting_;
  size_t written_ = 0;  // of it
  int error_ = 0;
};

// Whether two streams lead to the same file, pipe or terminal.
bool same_stream(int a, int b);

}  // namespace shoal
