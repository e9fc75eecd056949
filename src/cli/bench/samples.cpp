#include "cli/bench/samples.h"

#include <fmt/format.h>
#include <sys/utsname.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <sstream>
#include <thread>

#include "shoal/base/error.h"

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

int64_t loopback_bytes() {
  std::ifstream file("/proc/net/dev");
  for (std::string line; std::getline(file, line);) {
    const auto name = line.find("lo:");
    if (name == std::string::npos) continue;
    std::istringstream fields(line.substr(name + 3));
    int64_t received = 0;
    fields >> received;
    return received;
  }
  return 0;
}

double load_average() {
  std::ifstream file("/proc/loadavg");
  double load = 0;
  file >> load;
  return load;
}

nlohmann::ordered_json machine() {
  std::string processor = "unknown";
  std::ifstream cpus("/proc/cpuinfo");
  for (std::string line; std::getline(cpus, line);) {
    if (line.rfind("model name", 0) != 0) continue;
    processor = line.substr(line.find(':') + 2);
    break;
  }
  double memory_kib = 0;
  std::string label;
  std::ifstream("/proc/meminfo") >> label >> memory_kib;
  utsname system{};
  uname(&system);
  return {{"processor", processor},
          {"cores", std::thread::hardware_concurrency()},
          {"memory_gib", std::round(memory_kib / (1 << 20) * 10) / 10},
          {"system", fmt::format("{} {} {}", system.sysname, system.release, system.machine)}};
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
  return static_cast<int64_t>(number * std::pow(1024, place));
}

std::string format_bytes(int64_t bytes) {
  constexpr int64_t step = 1024;
  if (bytes < step) return fmt::format("{} B", bytes);
  if (bytes < step * step) return fmt::format("{:.4g} KiB", static_cast<double>(bytes) / step);
  if (bytes < step * step * step) return fmt::format("{:.4g} MiB", static_cast<double>(bytes) / (step * step));
  return fmt::format("{:.4g} GiB", static_cast<double>(bytes) / (step * step * step));
}

}  // namespace shoal::cli
