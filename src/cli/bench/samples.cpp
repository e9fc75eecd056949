#include "cli/bench/samples.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <sstream>

#include "shoal/error.h"

namespace shoal::cli {

double Samples::min() const {
  return *std::min_element(values.begin(), values.end());
}

double Samples::median() const {
  auto sorted = values;
  std::sort(sorted.begin(), sorted.end());
  const auto half = sorted.size() / 2;
  return sorted.size() % 2 == 1 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}

double Samples::max() const {
  return *std::max_element(values.begin(), values.end());
}

nlohmann::ordered_json Samples::json(const std::string& unit) const {
  return {{"min_" + unit, min()}, {"median_" + unit, median()}, {"max_" + unit, max()}};
}

int64_t parse_bytes(const std::string& text) {
  std::istringstream in(text);
  double number = 0;
  std::string unit;
  if (!(in >> number) || number < 1) throw UsageError(fmt::format("'{}' is not a size; write 4, 64K, 16M or 1G", text));
  in >> unit;
  constexpr std::string_view units = "KMG";
  const auto place = unit.empty() ? 0 : units.find(unit[0]) + 1;
  if (!unit.empty() && (place == 0 || unit.size() > 1)) {
    throw UsageError(fmt::format("'{}' is not a size; write 4, 64K, 16M or 1G", text));
  }
  const double bytes = number * std::pow(1024, place);
  constexpr double most = int64_t{1} << 50;
  if (!(bytes <= most)) throw UsageError(fmt::format("size {}: give at most {}G", text, int64_t{1} << 20));
  return static_cast<int64_t>(bytes);
}

std::string format_bytes(int64_t bytes) {
  constexpr int64_t step = 1024;
  if (bytes < step) return fmt::format("{} B", bytes);
  if (bytes < step * step) return fmt::format("{:.4g} KiB", static_cast<double>(bytes) / step);
  if (bytes < step * step * step) return fmt::format("{:.4g} MiB", static_cast<double>(bytes) / (step * step));
  return fmt::format("{:.4g} GiB", static_cast<double>(bytes) / (step * step * step));
}

}  // namespace shoal::cli
