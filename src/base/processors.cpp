#include "base/processors.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

namespace shoal {
namespace {

namespace fs = std::filesystem;

// Version 2 has both numbers in one file, "200000 100000" or "max 100000"; version 1 has a file each, and -1 for none.
std::optional<double> limit_of(const fs::path& group) {
  std::string quota;
  int64_t period = 0;
  if (std::ifstream both(group / "cpu.max"); both) {
    both >> quota >> period;
  } else {
    std::ifstream(group / "cpu.cfs_quota_us") >> quota;
    std::ifstream(group / "cpu.cfs_period_us") >> period;
  }
  int64_t time = 0;
  std::from_chars(quota.data(), quota.data() + quota.size(), time);
  if (time <= 0 || period <= 0) return std::nullopt;
  return static_cast<double>(time) / static_cast<double>(period);
}

bool has_processors(const std::string& controllers) {
  return ("," + controllers + ",").find(",cpu,") != std::string::npos;
}

std::optional<int> own_limit() {
  static const auto limit = processor_limit();
  return limit;
}

// 0: this process.
std::optional<cpu_set_t> affinity_of(int process) {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(process, sizeof set, &set) == 0 ? std::optional(set) : std::nullopt;
}

}  // namespace

// A group's limit holds for those in it. A container may see its own group as the root, though its name is another.
std::optional<int> processor_limit(const fs::path& root) {
  const auto mounts = root / "sys/fs/cgroup";
  std::optional<double> least;
  std::ifstream groups(root / "proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // "0::/path", or "4:cpu,cpuacct:/path" of version 1
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const auto controllers = line.substr(first + 1, second - first - 1);
    if (!controllers.empty() && !has_processors(controllers)) continue;
    const std::vector<std::string> folders =
        controllers.empty() ? std::vector<std::string>{"", "unified"} : std::vector{controllers, std::string("cpu")};
    for (const auto& folder : folders) {
      auto path = fs::path(line.substr(second + 1)).lexically_normal().relative_path();
      while (true) {
        const auto limit = limit_of(mounts / folder / path);
        if (limit) least = std::min(*limit, least.value_or(*limit));
        if (path.empty()) break;
        path = path.parent_path();
      }
    }
  }
  if (!least) return std::nullopt;
  return static_cast<int>(std::clamp(*least, 1.0, 1e6));
}

int processors_of_host() {
  // sysconf() opens a file at each call, and waits of every step ask.
  static const int online = std::max(1, static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)));
  return std::min(online, own_limit().value_or(online));
}

int processors() {
  const auto own = affinity_of(0);
  const auto all = processors_of_host();
  return own ? std::min(all, CPU_COUNT(&*own)) : all;
}

int share_of_processors(const cpu_set_t& own, const std::vector<cpu_set_t>& others, std::optional<int> limit) {
  double share = 0;
  for (int processor = 0; processor < CPU_SETSIZE; ++processor) {
    if (!CPU_ISSET(processor, &own)) continue;
    const auto sharing = std::count_if(others.begin(), others.end(),
                                       [&](const cpu_set_t& other) { return CPU_ISSET(processor, &other); });
    share += 1.0 / static_cast<double>(1 + sharing);
  }
  if (limit) share = std::min(share, *limit / static_cast<double>(1 + others.size()));
  constexpr double rounding = 1e-6;  // of three thirds
  return std::max(1, static_cast<int>(share + rounding));
}

int share_of_processors(const std::vector<int>& others) {
  const auto own = affinity_of(0);
  if (!own) return std::max(1, processors_of_host() / static_cast<int>(1 + others.size()));
  std::vector<cpu_set_t> sets;
  for (const int process : others) sets.push_back(affinity_of(process).value_or(*own));
  return share_of_processors(*own, sets, own_limit());
}

}  // namespace shoal
