#include "launch/line_pipe.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

namespace shoal {
namespace {

void write_all(int fd, const char* data, size_t size) {
  while (size > 0) {
    const auto written = write(fd, data, size);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return;  // nobody reads any more
    data += written;
    size -= static_cast<size_t>(written);
  }
}

}  // namespace

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
  write_lines();
}

// Looks at every byte once, however long a line is.
void LinePipe::take(const char* data, size_t size) {
  const auto* const end = data + size;
  while (data < end) {
    if (std::exchange(after_return_, false) && *data == '\n') {
      out_ += *data++;
      continue;
    }
    const auto* stop = std::find_if(data, end, [](char c) { return c == '\n' || c == '\r'; });
    const bool ends = stop != end;
    pending_.append(data, stop);
    if (ends) pending_ += *stop;
    if (ends || pending_.size() > most_pending) {
      if (!within_line_) out_ += prefix_;
      out_ += std::exchange(pending_, {});
      within_line_ = !ends;
    }
    after_return_ = ends && *stop == '\r';
    data = ends ? stop + 1 : end;
  }
}

void LinePipe::end_last_line() {
  if (pending_.empty() && !within_line_) {
    if (std::exchange(after_return_, false)) out_ += '\n';  // of a progress bar, for whoever writes next
    return;
  }
  out_ += (within_line_ ? std::string() : prefix_) + std::exchange(pending_, {}) + "\n";
}

void LinePipe::write_lines() {
  write_all(target_, out_.data(), out_.size());
  out_.clear();
}

}  // namespace shoal
