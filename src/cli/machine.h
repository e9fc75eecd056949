#pragma once
// Description of the machine, for reports of measurements.

#include <nlohmann/json.hpp>

namespace shoal::cli {

// Conditions of a measurement: CPU model and cores, memory, operating system, load average.
nlohmann::ordered_json machine();
double load_average();

}  // namespace shoal::cli
