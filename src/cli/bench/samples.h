#pragma once
// Samples and sizes in reports.

#include <nlohmann/json.hpp>
#include <string>

#include "planning/samples.h"

namespace shoal::cli {

// {"min_UNIT": ..., "median_UNIT": ..., "max_UNIT": ...}
nlohmann::ordered_json json_of(const Samples& samples, const std::string& unit);

// Parses "4", "64K", "16M", "1G" to bytes. Throws UsageError.
int64_t parse_bytes(const std::string& text);
std::string format_bytes(int64_t bytes);

}  // namespace shoal::cli
