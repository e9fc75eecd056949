#pragma once
// Hierarchical transport for a group over several hosts: ranks of a host share memory, and each of them carries its own
// range to the other hosts.

#include <memory>

#include "comm/hierarchical/host_grid.h"
#include "comm/shm/host_memory.h"
#include "comm/transport/transport.h"

namespace shoal {

struct HierarchicalParts {
  HostGrid grid;
  std::shared_ptr<Transport> up;      // ranks of this host, for stages before the network
  std::shared_ptr<Transport> down;    // the same ranks, for stages after it
  std::shared_ptr<Transport> across;  // ranks at this rank's place on every host, by host
  std::shared_ptr<Transport> flat;    // all ranks, for operations whose data differ for every pair of ranks
  std::shared_ptr<shm::HostMemory> memory;
};

// S bytes on H hosts with L ranks each; what every host sends is the minimum:
//   all_reduce       reduce-scatter inside, all-reduce of S / L across, all-gather inside      2 (H - 1) / H S per host
//   reduce_scatter   reduce-scatter inside, all-to-all across and sum                          (H - 1) / H S
//   all_gather       all-gather across, all-gather inside                                      (H - 1) / H S
//   broadcast        scatter inside, broadcast of S / L across, all-gather inside              S to each other host
//   reduce           reduce-scatter inside, gather of S / L across and sum, gather inside      S from each other host
// 16-bit sums and averages are rounded once per level.
std::shared_ptr<Transport> make_hierarchical_transport(HierarchicalParts parts);

}  // namespace shoal
