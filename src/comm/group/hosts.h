#pragma once
// Hosts of a group's ranks.

#include <string>
#include <vector>

#include "shoal/group.h"

namespace shoal {

// Index of each rank's host; hosts are numbered in the order of their first ranks. Not collective.
std::vector<int> hosts_of(const Group& group);
// Names of the hosts, by these indices. They stay when ranks end. Not collective.
std::vector<std::string> names_of_hosts(const Group& group);
// The world's number of each rank. Not collective.
std::vector<int> world_ranks(const Group& group);
// Whether the group was made by Group::by_host(). Not collective.
bool is_by_host(const Group& group);

}  // namespace shoal
