#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "base/print_to_stderr.h"
#include "shoal/progress.h"

namespace shoal {

using std::chrono::duration;
using std::chrono::milliseconds;
using std::chrono::seconds;

namespace {

ProgressBarOptions on_rank_0(const World& world, ProgressBarOptions options) {
  options.enabled = options.enabled && world.rank() == 0;
  return options;
}

}  // namespace

ProgressBar::ProgressBar(int64_t total, const ProgressBarOptions& options)
    : options_(options), terminal_(isatty(STDERR_FILENO) != 0), total_(std::max<int64_t>(1, total)) {}

ProgressBar::ProgressBar(const World& world, int64_t total, const ProgressBarOptions& options)
    : ProgressBar(total, on_rank_0(world, options)) {}

ProgressBar::~ProgressBar() {
  clear();
}

void ProgressBar::clear() {
  if (!std::exchange(drawn_, false)) return;
  write_to_stderr("\r\x1b[K");
}

std::string ProgressBar::text(const std::string& note, Clock::time_point now) const {
  const double elapsed = duration<double>(now - start_).count();
  const double done = static_cast<double>(done_) / static_cast<double>(total_);
  const auto left = static_cast<int64_t>(std::max(0.0, elapsed / done - elapsed));
  return fmt::format("{:3.0f} %  step {}/{}  {:.3g} {}/s{}{}  {}:{:02} left", 100 * done, done_, total_,
                     static_cast<double>(done_) * options_.unit_scale / elapsed, options_.unit,
                     note.empty() ? "" : "  ", note, left / 60, left % 60);
}

void ProgressBar::update(int64_t steps, const std::string& note) {
  done_ += steps;
  const auto now = Clock::now();
  const bool early = now - start_ < seconds(2);
  const bool recent = now - last_ < (terminal_ ? milliseconds(100) : milliseconds(10000));
  const bool ends = done_ == total_ && (terminal_ ? drawn_ : !early);
  if (!options_.enabled || done_ <= 0 || ((early || recent) && !ends)) return;
  last_ = now;
  if (terminal_) {
    // A line that is longer than the terminal's would stay behind with each redraw.
    winsize size{};
    const size_t columns = ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 1 ? size.ws_col - 1U : 79U;
    auto line = text(note, now);
    const auto room = static_cast<int64_t>(columns) - static_cast<int64_t>(line.size()) - 3;
    if (const auto width = std::min<int64_t>(room, 24); width >= 8) {
      const auto filled = static_cast<size_t>(std::min(total_, done_) * width / total_);
      line = fmt::format("[{}{}] {}", std::string(filled, '='), std::string(static_cast<size_t>(width) - filled, ' '),
                         line);
    }
    print_to_stderr("\r\x1b[K{}", line.substr(0, columns));
    drawn_ = true;
  } else {
    print_to_stderr("{}\n", text(note, now));
  }
}

}  // namespace shoal
