#pragma once
// Description of the machine, for reports of measurements.

#include <cstdint>
#include <nlohmann/json.hpp>

namespace shoal::cli {

// Bytes that the loopback interface has carried since the system started; TCP between ranks of one host shows here.
int64_t loopback_bytes();

// Model name and number of cores, memory, operating system, load average: what a figure depends on.
nlohmann::ordered_json machine();
double load_average();

}  // namespace shoal::cli
