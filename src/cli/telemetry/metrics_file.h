#pragma once
// Metrics files, which `shoal train --metrics` writes and other programs may: one JSON object per line, with a `step`.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace shoal::cli {

struct MetricsLine {
  int64_t step = 0;
  std::vector<std::pair<std::string, double>> numbers{};  // without the step; NaN for null
  std::string event{};  // what happened after this step; then the numbers are about that. Empty: a line of metrics

  std::optional<double> find(const std::string& name) const;
  // NaN for what is not there.
  double number(const std::string& name) const;
};

// {"step": ..., "event": ..., and its numbers}
nlohmann::ordered_json to_json(const MetricsLine& event);

// Lines that are left out: those that are not JSON, have no step, are longer than 64 KiB, or have more than 64 numbers.
struct DamagedLines {
  int64_t count = 0;
  std::string first{};  // the first one's file, line and fault

  // Empty: there are none.
  std::string in_words() const;
};

// Hands out all complete lines; the last one may lack its line end. A part of a last line is still being written and is
// left out, as are values that are not numbers. NaN, Infinity and -Infinity are numbers, as Python writes them. Reads
// piece by piece. UsageError that names file and line if all lines are damaged.
DamagedLines read_metrics(const std::filesystem::path& file, const std::function<void(const MetricsLine& line)>& each);

// The last lines, out of the last 256 KiB. Errors as above.
struct LastMetrics {
  std::vector<MetricsLine> lines;
  DamagedLines damaged;
};
LastMetrics last_metrics(const std::filesystem::path& file);

}  // namespace shoal::cli
