#pragma once
// One look at a run: what `shoal top` shows.

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cli/telemetry/lateness.h"
#include "cli/telemetry/metrics_file.h"
#include "cli/telemetry/run_files.h"

namespace shoal::cli {

struct Frame {
  RunFiles files;
  // Of the metrics; NaN where they do not say.
  std::optional<int64_t> step{};  // none: there are no metrics yet
  std::optional<double> loss{};
  double lr = 0, rate = 0, step_ms = 0, wait_ms = 0, update_ms = 0;
  double age_s = 0;                                          // since the metrics were written
  std::vector<double> losses{};                              // the last ones
  DamagedLines damaged{};                                    // among the last ones
  std::vector<std::pair<std::string, double>> evaluation{};  // the last one
  int64_t evaluated_step = 0;
  std::vector<MetricsLine> events{};  // of the last lines, such as the ends of ranks
  // Of the flight recorders.
  std::vector<RankView> ranks{};
  std::vector<std::string> verdict{};
};

// Errors as those of find_run(), last_metrics() and read_flights().
Frame look_at(const std::filesystem::path& place);

// Lines of at most `width` characters; `height`: of the screen, 0: any. What has no room is counted.
std::string in_words(const Frame& frame, int width, int height);
nlohmann::ordered_json to_json(const Frame& frame);

}  // namespace shoal::cli
