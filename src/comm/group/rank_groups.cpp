#include "comm/group/rank_groups.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "shoal/error.h"

namespace shoal {
namespace {

std::string listed(const std::vector<std::vector<int>>& groups) {
  std::vector<std::string> lines;
  for (size_t host = 0; host < groups.size(); ++host) {
    lines.push_back(fmt::format("host {} has rank {}", host, fmt::join(groups[host], ", ")));
  }
  return fmt::format("{}", fmt::join(lines, "; "));
}

std::vector<std::vector<int>> by_number(const std::vector<int>& numbers) {
  std::vector<std::vector<int>> groups;
  for (size_t rank = 0; rank < numbers.size(); ++rank) {
    const auto number = static_cast<size_t>(numbers[rank]);
    if (number >= groups.size()) groups.resize(number + 1);
    groups[number].push_back(static_cast<int>(rank));
  }
  return groups;
}

}  // namespace

std::vector<std::vector<int>> ranks_by_host(const std::vector<int>& hosts) {
  return by_number(hosts);
}

std::vector<std::vector<int>> rank_groups(const std::vector<int>& hosts, std::optional<int> size,
                                          const std::string& who, const std::string& size_option) {
  const auto ranks = static_cast<int>(hosts.size());
  if (size && (*size < 1 || ranks % *size != 0)) {
    throw UsageError(fmt::format("{}: {} ranks are not a multiple of {} {}; give a number that divides them", who,
                                 ranks, size_option, *size));
  }
  auto numbers = hosts;
  for (int rank = 0; size && rank < ranks; ++rank) numbers[rank] = rank / *size;
  auto groups = by_number(numbers);
  const bool equal = std::all_of(groups.begin(), groups.end(),
                                 [&](const auto& group) { return group.size() == groups.front().size(); });
  if (equal) return groups;
  throw UsageError(
      fmt::format("{}: the model is sharded over the ranks of each host, but hosts run different numbers of ranks "
                  "({}); start the same number on each host, or set {}",
                  who, listed(groups), size_option));
}

int smallest(const std::vector<std::vector<int>>& groups) {
  const auto smaller = [](const auto& one, const auto& other) { return one.size() < other.size(); };
  return static_cast<int>(std::min_element(groups.begin(), groups.end(), smaller)->size());
}

HybridRanks hybrid_ranks(const std::vector<std::vector<int>>& groups, int rank) {
  HybridRanks place;
  for (const auto& group : groups) {
    const auto here = static_cast<size_t>(std::find(group.begin(), group.end(), rank) - group.begin());
    if (here == group.size()) continue;
    place.inside = group;
    if (std::any_of(groups.begin(), groups.end(), [&](const auto& other) { return here >= other.size(); })) continue;
    for (const auto& other : groups) place.across.push_back(other[here]);
  }
  return place;
}

}  // namespace shoal
