#include "launch/leftovers.h"

#include <dirent.h>
#include <unistd.h>

#include <charconv>
#include <csignal>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>

namespace shoal {
namespace {

bool belongs_to(pid_t pid, const std::string& entry) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/environ", std::ios::binary);
  const std::string environment((std::istreambuf_iterator<char>(file)), {});
  for (size_t begin = 0; begin < environment.size();) {
    const auto end = std::min(environment.find('\0', begin), environment.size());
    if (environment.compare(begin, entry.size(), entry) == 0) {
      const auto next = begin + entry.size();
      return next >= end || environment[next] == '/';
    }
    begin = end + 1;
  }
  return false;
}

int end_once(const std::string& entry) {
  const std::unique_ptr<DIR, int (*)(DIR*)> processes(opendir("/proc"), closedir);
  int ended = 0;
  while (const auto* process = processes ? readdir(processes.get()) : nullptr) {
    pid_t pid = 0;
    const auto* name = process->d_name;
    const auto [rest, error] = std::from_chars(name, name + std::strlen(name), pid);
    if (error != std::errc() || *rest != '\0' || pid == getpid() || !belongs_to(pid, entry)) continue;
    ended += kill(pid, SIGKILL) == 0 ? 1 : 0;
  }
  return ended;
}

}  // namespace

int end_processes_of(const std::string& job) {
  const auto entry = std::string(job_variable) + "=" + job;
  constexpr int rounds = 5;  // a process that is just being started is found in the next round
  int ended = 0;
  for (int round = 0; round < rounds; ++round) {
    const int found = end_once(entry);
    ended += found;
    if (found == 0) break;
    usleep(5000);  // killed processes are found until they are gone
  }
  return ended;
}

}  // namespace shoal
