// `shoal top`: a run, live in the terminal.

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <limits>
#include <memory>
#include <thread>

#include "base/printable.h"
#include "cli/commands.h"
#include "cli/telemetry/frame.h"
#include "cli/telemetry/run_files.h"
#include "cli/train/report.h"
#include "cli/writable.h"
#include "shoal/error.h"

namespace shoal::cli {
namespace {

struct TopOptions {
  std::filesystem::path place;
  double interval = 1;
  bool once = false;
  std::string json;
};

void show_live(const TopOptions& options) {
  for (bool first = true;; first = false) {
    winsize size{};
    if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) size = {24, 80, 0, 0};
    std::string text;
    try {
      text = in_words(look_at(options.place), size.ws_col, size.ws_row);
    } catch (const UsageError& error) {  // may pass: a file that is just being written
      if (first) throw;
      text = printable(error.what()) + "\n";
    }
    fmt::print("\x1b[H\x1b[2J{}", text);   // from the top of an empty screen
    if (std::fflush(stdout) != 0) return;  // the terminal has gone
    std::this_thread::sleep_for(std::chrono::duration<double>(options.interval));
  }
}

int top(const TopOptions& options) {
  if (options.json.empty() && !options.once && isatty(STDOUT_FILENO) != 0) {
    show_live(options);
    return 0;
  }
  const auto frame = look_at(options.place);
  if (options.json != "-") fmt::print("{}", in_words(frame, std::numeric_limits<int>::max(), 0));
  if (!options.json.empty()) write_json(options.json, to_json(frame));
  return 0;
}

}  // namespace

void add_top_command(CLI::App& app, Action& chosen) {
  auto* command = app.add_subcommand("top", "show a run live: step, loss, rate, times, ranks, and which rank is late");
  command->footer(
      "Reads what shoal train --metrics PLACE/metrics.jsonl --flight-recorder PLACE writes, while it runs or "
      "afterwards. Late: how many milliseconds after the first rank this one enters an operation, on average over the "
      "last ones. Ctrl-C ends it.");
  const auto options = std::make_shared<TopOptions>();
  command->add_option("place", options->place, "folder of the run, or one of its files")->required();
  command->add_option("--interval", options->interval, "seconds between two looks")->capture_default_str();
  command->add_flag("--once", options->once, "look once, as when standard output is no terminal");
  command->add_option("--json", options->json, "look once and write it as JSON to this file; - is standard output");
  command->callback([options, &chosen] {
    if (!(options->interval >= 0.1 && options->interval <= 3600)) {
      throw UsageError(fmt::format("--interval {}: give 0.1 to 3600 seconds", options->interval));
    }
    require_not_read("--json", options->json, find_run(options->place).all());
    require_writable_file("--json", options->json);
    chosen = [options] { return top(*options); };
  });
}

}  // namespace shoal::cli
