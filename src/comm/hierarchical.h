#pragma once
// A group over several hosts: ranks of one host share memory, every local rank carries its own range to the other
// hosts.

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "comm/transport.h"

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

struct HierarchicalParts {
  HostGrid grid;
  std::shared_ptr<Transport> up;      // ranks of this host, before the network
  std::shared_ptr<Transport> down;    // the same ranks, after it
  std::shared_ptr<Transport> across;  // the ranks at this rank's place on every host, by host
  std::shared_ptr<Transport> flat;    // all ranks, for operations whose data differ for every pair of ranks
};

// S bytes on H hosts with L ranks each; what every host sends is the minimum:
//   all_reduce       reduce-scatter inside, all-reduce of S / L across, all-gather inside      2 (H - 1) / H S per host
//   reduce_scatter   reduce-scatter inside, all-to-all across and sum                          (H - 1) / H S
//   all_gather       all-gather across, all-gather inside                                      (H - 1) / H S
//   broadcast        scatter inside, broadcast of S / L across, all-gather inside              S to each other host
//   reduce           reduce-scatter inside, gather of S / L across and sum, gather inside      S from each other host
// 16-bit sums are rounded once per level.
std::shared_ptr<Transport> make_hierarchical_transport(HierarchicalParts parts);

}  // namespace shoal
