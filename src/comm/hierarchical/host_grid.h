#pragma once
// Grid of a group's ranks: hosts, and places on each host.

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace shoal {

// Hosts and places of the ranks, which are numbered as in the group.
struct HostGrid {
  int hosts = 0;
  int local_size = 0;                      // ranks per host, the same on all hosts
  int host = 0;                            // this rank's host
  int local = 0;                           // this rank's place on its host
  std::vector<std::vector<int>> ranks;     // ranks[host][local]
  std::vector<std::pair<int, int>> place;  // host and local place, by rank
};

// Nothing if hosts have different numbers of ranks, or only one each.
std::optional<HostGrid> make_host_grid(const std::vector<std::string>& host_of_rank, int rank);

}  // namespace shoal
