#pragma once
// Limits of the number of ranks of a topology.

#include <string>

namespace shoal {

// UsageError outside 1 .. max_topology_ranks, before anything of that size is made.
void require_topology_size(const std::string& name, int size);

}  // namespace shoal
