#include "cli/train/memory.h"

#include <fstream>
#include <string>

namespace shoal::cli {
namespace {

// Reads a line such as "VmRSS:     1234 kB".
double field_mib(const char* path, const std::string& field) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    if (line.rfind(field + ":", 0) == 0) return std::stod(line.substr(field.size() + 1)) / 1024;
  }
  return 0;
}

}  // namespace

double resident_mib() {
  return field_mib("/proc/self/status", "VmRSS");
}
double peak_resident_mib() {
  return field_mib("/proc/self/status", "VmHWM");
}
double proportional_mib() {
  return field_mib("/proc/self/smaps_rollup", "Pss");
}
void reset_peak() {
  std::ofstream("/proc/self/clear_refs") << "5";
}

}  // namespace shoal::cli
