#pragma once
// Partition of a group's ranks by host.

#include <vector>

#include "shoal/group.h"

namespace shoal {

// The number of each rank's host; hosts are numbered in the order of their first ranks. Not collective.
std::vector<int> hosts_of(const Group& group);

}  // namespace shoal
