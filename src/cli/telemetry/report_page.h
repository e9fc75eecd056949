#pragma once
// Page with the curves of runs.

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/telemetry/lateness.h"
#include "cli/telemetry/series.h"

namespace shoal::cli {

struct RunReport {
  std::string name;
  std::map<std::string, Series> series{};
  DamagedLines damaged{};             // of the metrics file
  std::vector<MetricsLine> events{};  // the last ones
  int64_t event_count = 0;
  std::vector<RankView> ranks{};
  std::vector<std::string> verdict{};  // of the flight recorders
};

// One for each metrics file of a folder; flight recorders belong to the newest, the last one. Errors as those of
// find_run(), read_series() and read_flights().
std::vector<RunReport> read_runs(const std::string& place);

// One page with a plot for each kind of metric, in which each run has its lines, and tables of figures and ranks.
std::string report_page(const std::vector<RunReport>& runs);
nlohmann::ordered_json to_json(const std::vector<RunReport>& runs);

}  // namespace shoal::cli
