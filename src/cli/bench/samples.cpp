#include "cli/bench/samples.h"

#include <fmt/format.h>

#include <cmath>
#include <sstream>

#include "shoal/error.h"

namespace shoal::cli {

nlohmann::ordered_json json_of(const Samples& samples, const std::string& unit) {
  return {{"min_" + unit, samples.min()}, {"median_" + unit, samples.median()}, {"max_" + unit, samples.max()}};
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
