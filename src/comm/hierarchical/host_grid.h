#pragma once
// The ranks of a group as a table of hosts and places on them.

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace shoal {

// Where the ranks of a group run. Numbered by the group's ranks.
struct HostGrid {
  int hosts = 0;
  int local_size = 0;                      // ranks per host, equal on all hosts
  int host = 0;                            // of this rank
  int local = 0;                           // this rank's place on its host
  std::vector<std::vector<int>> ranks;     // ranks[host][local]
  std::vector<std::pair<int, int>> place;  // of each rank: host, local
};

// No value when hosts have different numbers of ranks, or each only one.
std::optional<HostGrid> make_host_grid(const std::vector<std::string>& host_of_rank, int rank);

}  // namespace shoal
