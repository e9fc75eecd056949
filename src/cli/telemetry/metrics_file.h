#pragma once
// Metrics files, which `shoal train --metrics` writes and other programs may: one JSON object per line, with a `step`.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace shoal::cli {

struct MetricsLine {
  int64_t step = 0;
  std::vector<std::pair<std::string, double>> numbers{};  // without the step; NaN for null

  // NaN for what is not there.
  double number(const std::string& name) const;
};

// Hands out all complete lines. A last one without its line end is still being written and is left out, as are values
// that are not numbers. Reads piece by piece. UsageError that names file and line for what is not JSON, has no step, is
// longer than 64 KiB, or has more than 64 numbers.
void read_metrics(const std::filesystem::path& file, const std::function<void(const MetricsLine& line)>& each);

// The last lines, out of the last 256 KiB.
std::vector<MetricsLine> last_metrics(const std::filesystem::path& file);

}  // namespace shoal::cli
