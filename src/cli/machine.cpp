#include "cli/machine.h"

#include <fmt/format.h>
#include <sys/utsname.h>

#include <cmath>
#include <fstream>
#include <string>
#include <thread>

namespace shoal::cli {

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

}  // namespace shoal::cli
