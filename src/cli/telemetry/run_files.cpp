#include "cli/telemetry/run_files.h"

#include <fmt/format.h>

#include <algorithm>

#include "shoal/error.h"

namespace shoal::cli {

namespace fs = std::filesystem;

std::vector<fs::path> RunFiles::all() const {
  auto files = flights;
  if (metrics) files.push_back(*metrics);
  files.insert(files.end(), older.begin(), older.end());
  return files;
}

RunFiles find_run(const fs::path& place) {
  RunFiles run{.place = place};
  std::error_code error;
  if (!fs::is_directory(place, error)) {
    if (place.extension() == ".flight") {
      run.flights.push_back(place);
    } else {
      run.metrics = place;
    }
    return run;
  }
  fs::file_time_type newest;
  for (const auto& entry : fs::directory_iterator(place, error)) {
    if (entry.path().extension() == ".flight") run.flights.push_back(entry.path());
    if (entry.path().extension() != ".jsonl") continue;
    std::error_code gone;
    const auto written = entry.last_write_time(gone);
    if (gone) continue;
    const bool is_newest = !run.metrics || written > newest;
    if (run.metrics) run.older.push_back(is_newest ? *run.metrics : entry.path());
    if (!is_newest) continue;
    newest = written;
    run.metrics = entry.path();
  }
  std::sort(run.older.begin(), run.older.end());
  if (error) throw UsageError(fmt::format("cannot read folder {}: {}", place.string(), error.message()));
  if (!run.metrics && run.flights.empty()) {
    throw UsageError(
        fmt::format("{0} has neither metrics (*.jsonl) nor flight recorders (rank-N.flight): run shoal train "
                    "--metrics {0}/metrics.jsonl --flight-recorder {0}",
                    place.string()));
  }
  return run;
}

}  // namespace shoal::cli
