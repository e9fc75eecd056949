#include "comm/hierarchical/host_grid.h"

#include <algorithm>
#include <map>
#include <tuple>

namespace shoal {

std::optional<HostGrid> make_host_grid(const std::vector<std::string>& host_of_rank, int rank) {
  HostGrid grid;
  std::map<std::string, int> numbers;
  for (int of = 0; of < static_cast<int>(host_of_rank.size()); ++of) {
    const auto host = numbers.try_emplace(host_of_rank[of], static_cast<int>(numbers.size())).first->second;
    if (host == static_cast<int>(grid.ranks.size())) grid.ranks.emplace_back();
    grid.place.emplace_back(host, static_cast<int>(grid.ranks[host].size()));
    grid.ranks[host].push_back(of);
  }
  grid.hosts = static_cast<int>(grid.ranks.size());
  grid.local_size = static_cast<int>(grid.ranks[0].size());
  std::tie(grid.host, grid.local) = grid.place[rank];
  const bool even = std::all_of(grid.ranks.begin(), grid.ranks.end(),
                                [&](const auto& ranks) { return static_cast<int>(ranks.size()) == grid.local_size; });
  if (!even || grid.local_size == 1 || grid.hosts == 1) return std::nullopt;
  return grid;
}

}  // namespace shoal
