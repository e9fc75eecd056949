#pragma once
// Processes that compute on all cores.

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "base/processors.h"
#include "comm/shm/host_load.h"

namespace shoal::test {

class BusyCores {
 public:
  // Whether HostLoad can see them.
  static bool seen() {
    std::ifstream file("/proc/loadavg");
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    return shm::runnable_threads(text).value_or(0) > 0 && processors() >= sysconf(_SC_NPROCESSORS_ONLN);
  }

  BusyCores() {
    for (long i = 0; i < sysconf(_SC_NPROCESSORS_ONLN) + 1; ++i) {
      pids_.push_back(fork());
      if (pids_.back() != 0) continue;
      alarm(20);
      while (true) {
      }
    }
  }
  ~BusyCores() {
    for (const auto pid : pids_) {
      kill(pid, SIGKILL);
      waitpid(pid, nullptr, 0);
    }
  }
  BusyCores(const BusyCores&) = delete;
  BusyCores& operator=(const BusyCores&) = delete;

 private:
  std::vector<pid_t> pids_;
};

}  // namespace shoal::test
