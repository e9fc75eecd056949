#pragma once
// Description of the machine, for reports of measurements.

#include <cstdint>
#include <nlohmann/json.hpp>

namespace shoal::cli {

// Bytes that the loopback interface has carried since the system started, including TCP between ranks of one host.
int64_t loopback_bytes();

// Conditions of a measurement: CPU model and cores, memory, operating system, load average.
nlohmann::ordered_json machine();
double load_average();

}  // namespace shoal::cli
