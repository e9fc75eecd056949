#include "launch/line_pipe.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

namespace shoal {

void LinePipe::pump() {
  std::array<char, 65536> buffer;
  const auto count = read(fd_, buffer.data(), buffer.size());
  if (count < 0 && (errno == EINTR || errno == EAGAIN)) return;
  if (count > 0) {
    take(buffer.data(), static_cast<size_t>(count));
  } else {
    end_last_line();
    close(fd_);
    fd_ = -1;
  }
  target_->drain();
}

// Inspects every byte once, however long a line is.
void LinePipe::take(const char* data, size_t size) {
  const auto* const end = data + size;
  while (data < end) {
    if (std::exchange(after_return_, false) && *data == '\n') {
      target_->add({data++, 1});
      continue;
    }
    const auto* stop = std::find_if(data, end, [](char c) { return c == '\n' || c == '\r'; });
    const bool ends = stop != end;
    pending_.append(data, stop);
    if (ends) pending_ += *stop;
    if (ends || pending_.size() > most_pending) forward(ends);
    after_return_ = ends && *stop == '\r';
    data = ends ? stop + 1 : end;
  }
}

void LinePipe::end_last_line() {
  if (pending_.empty() && !target_->within_line_of(fd_)) {
    if (std::exchange(after_return_, false)) target_->add("\n");  // ends a progress bar's line before other output
    return;
  }
  pending_ += '\n';
  forward(/*ends=*/true);
}

void LinePipe::forward(bool ends) {
  if (!target_->within_line_of(fd_)) pending_.insert(0, prefix_);
  target_->add(std::exchange(pending_, {}), fd_, ends);
}

}  // namespace shoal
