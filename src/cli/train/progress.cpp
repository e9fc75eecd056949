#include "cli/train/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <utility>

namespace shoal::cli {

using std::chrono::duration;
using std::chrono::milliseconds;
using std::chrono::seconds;

Progress::Progress(bool enabled, int64_t steps, std::string rate_unit)
    : enabled_(enabled), terminal_(isatty(STDERR_FILENO) != 0), steps_(steps), unit_(std::move(rate_unit)) {}

Progress::~Progress() {
  clear();
}

void Progress::clear() {
  if (std::exchange(drawn_, false)) fmt::print(stderr, "\r\x1b[K");
}

void Progress::update(int64_t step, int64_t amount, std::optional<double> loss, const std::string& note) {
  if (loss) loss_ = step <= 1 ? *loss : 0.95 * loss_ + 0.05 * *loss;
  const auto now = Clock::now();
  const bool quiet = now - start_ < seconds(2) || now - last_ < (terminal_ ? milliseconds(100) : milliseconds(10000));
  if (!enabled_ || (quiet && !(terminal_ && step == steps_ && drawn_))) return;
  last_ = now;
  const double elapsed = duration<double>(now - start_).count();
  const double done = static_cast<double>(step) / static_cast<double>(steps_);
  const auto left = static_cast<int64_t>(elapsed / done - elapsed);
  const auto text =
      fmt::format("{:3.0f} %  step {}/{}  {:.3g} {}/s{}{}{}  {}:{:02} left", 100 * done, step, steps_,
                  static_cast<double>(amount) / elapsed, unit_, loss ? fmt::format("  loss {:.4f}", loss_) : "",
                  note.empty() ? "" : "  ", note, left / 60, left % 60);
  if (terminal_) {
    constexpr int width = 24;
    const auto filled = static_cast<int>(done * width);
    fmt::print(stderr, "\r\x1b[K[{}{}] {}", std::string(filled, '='), std::string(width - filled, ' '), text);
    drawn_ = true;
  } else {
    fmt::print(stderr, "{}\n", text);
  }
  std::fflush(stderr);
}

}  // namespace shoal::cli
