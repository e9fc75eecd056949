#pragma once
// Groups of ranks that shard a model among them; the groups are replicas of each other.

#include <optional>
#include <string>
#include <vector>

namespace shoal {

// The ranks of each host. hosts: by rank, as returned by hosts_of(). Ranks within a group are in order; groups are in
// the order of their first ranks.
std::vector<std::vector<int>> ranks_by_host(const std::vector<int>& hosts);
// The same, or with `size` that many consecutive ranks. UsageError, naming `who`, if groups would differ in size.
std::vector<std::vector<int>> rank_groups(const std::vector<int>& hosts, std::optional<int> size,
                                          const std::string& who, const std::string& size_option);

// Ranks of the smallest group.
int smallest(const std::vector<std::vector<int>>& groups);

// The ranks of one rank's group, and the ranks that have the same place in every group; empty if some group has no such
// place.
struct HybridRanks {
  std::vector<int> inside;
  std::vector<int> across;
};
HybridRanks hybrid_ranks(const std::vector<std::vector<int>>& groups, int rank);

}  // namespace shoal
