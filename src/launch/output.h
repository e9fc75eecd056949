#pragma once
// Standard output and error of a launcher: the lines of its ranks, and its own.

#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <utility>
#include <vector>

#include "launch/child.h"
#include "launch/outlet.h"

namespace shoal {

class Output {
 public:
  // For the ranks' output.
  Outlets outlets() { return {&out_, &err()}; }

  // Writes a line of the launcher to standard error.
  template <class... Arguments>
  void say(fmt::format_string<Arguments...> text, Arguments&&... arguments) {
    err().add("shoal: " + fmt::format(text, std::forward<Arguments>(arguments)...) + "\n");
    err().drain();
  }

  // Adds what to wait for until more can be written.
  void wait_for(std::vector<pollfd>& waits) const;
  void drain();
  bool empty() const { return out_.empty() && err_.empty(); }
  // errno of a failed write; 0: none.
  int error() const { return out_.error() != 0 ? out_.error() : err_.error(); }

 private:
  Outlet& err() { return one_stream_ ? out_ : err_; }

  Outlet out_{STDOUT_FILENO};
  Outlet err_{STDERR_FILENO};
  const bool one_stream_ = same_stream(STDOUT_FILENO, STDERR_FILENO);  // then all output goes to out_, line by line
};

}  // namespace shoal
