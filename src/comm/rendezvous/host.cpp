#include "comm/rendezvous/host.h"

#include <fmt/format.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>

namespace shoal {
namespace {

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

struct Stat {
  char state = 0;  // 0: no such process
  uint64_t start_time = 0;
};

// Parses /proc/PID/stat: "pid (name) state ppid ...". The start time is the 22nd field; the name may contain blanks and
// brackets.
Stat read_stat(int pid) {
  const auto line = first_line(fmt::format("/proc/{}/stat", pid));
  const auto bracket = line.rfind(')');
  if (bracket == std::string::npos) return {};
  std::istringstream fields(line.substr(bracket + 1));
  Stat stat;
  fields >> stat.state;
  std::string skipped;
  for (int field = 4; field < 22; ++field) fields >> skipped;
  fields >> stat.start_time;
  return stat;
}

}  // namespace

std::string host_identity(const std::string& proc) {
  std::error_code error;
  const auto pid_namespace = std::filesystem::read_symlink(proc + "/self/ns/pid", error);
  const auto boot = first_line(proc + "/sys/kernel/random/boot_id");
  if (!error && !boot.empty()) return boot + "/" + pid_namespace.string();
  static const auto number = std::random_device()();
  return fmt::format("?/{:08x}-{}", number, getpid());  // of a process that is forked, too
}

ProcessId this_process() {
  return process_of(getpid());
}

ProcessId process_of(int pid) {
  return {pid, read_stat(pid).start_time};
}

ProcessState state_of(const ProcessId& process) {
  const auto stat = read_stat(process.pid);
  if (stat.state == 0 || stat.state == 'Z' || stat.state == 'X' || stat.start_time != process.start_time) {
    return ProcessState::gone;
  }
  return stat.state == 'T' ? ProcessState::stopped : ProcessState::running;
}

}  // namespace shoal
