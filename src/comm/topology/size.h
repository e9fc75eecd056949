#pragma once
// Limits on the number of ranks in a topology.

#include <string>

namespace shoal {

// UsageError outside 1 .. max_topology_ranks, thrown before anything of that size is allocated.
void require_topology_size(const std::string& name, int size);

}  // namespace shoal
