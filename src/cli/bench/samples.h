#pragma once
// Samples of repeated measurements.

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace shoal::cli {

struct Samples {
  std::vector<double> values;

  double min() const;
  double median() const;
  double max() const;
  // {"min_UNIT": ..., "median_UNIT": ..., "max_UNIT": ...}
  nlohmann::ordered_json json(const std::string& unit) const;
};

// Parses "4", "64K", "16M", "1G" to bytes. Throws UsageError.
int64_t parse_bytes(const std::string& text);
std::string format_bytes(int64_t bytes);

}  // namespace shoal::cli
