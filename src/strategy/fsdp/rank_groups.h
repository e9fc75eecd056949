#pragma once
// Ranks that divide a model among them, where several such groups have equal shards.

#include <optional>
#include <string>
#include <vector>

namespace shoal {

// The groups: the ranks of each host, or `size` ranks in a row. hosts: by rank, as hosts_of(). In each group ranks
// are in order; groups are in the order of their first ranks. UsageError, on behalf of `who`, when they would be of
// different sizes.
std::vector<std::vector<int>> rank_groups(const std::vector<int>& hosts, std::optional<int> size,
                                          const std::string& who, const std::string& size_option);

// Those of the group in which `rank` is, and those that have its place in every group.
struct RankPlace {
  std::vector<int> inside;
  std::vector<int> across;
};
RankPlace place_of(const std::vector<std::vector<int>>& groups, int rank);

}  // namespace shoal
