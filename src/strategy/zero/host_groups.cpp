#include "strategy/zero/host_groups.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "comm/group/hosts.h"
#include "comm/group/rank_groups.h"
#include "engine/wrapper/data_parallel_state.h"
#include "shoal/error.h"

namespace shoal {
namespace {

enum class Over { all, host, others };

Over ranks_over(const OSSCore& optimizer, const Group& group) {
  const auto theirs = world_ranks(optimizer.group());
  const auto ours = world_ranks(group);
  if (theirs == ours) return Over::all;
  std::vector<int> on_host;
  const auto here = hybrid_ranks(ranks_by_host(hosts_of(group)), group.rank());
  for (const int rank : here.inside) on_host.push_back(ours[static_cast<size_t>(rank)]);
  return theirs == on_host ? Over::host : Over::others;
}

}  // namespace

// A gradient goes to the rank that has its owner's number, so all must number the same ranks alike.
ShardGroups groups_of(const std::vector<OSSCore*>& optimizers, const Group& group) {
  std::vector<std::string> lines;
  for (const auto* optimizer : optimizers) {
    const auto over = ranks_over(*optimizer, group);
    lines.emplace_back(over == Over::all    ? "OSS over the wrapper's ranks"
                       : over == Over::host ? "OSS over the ranks of each host"
                                            : "OSS over other ranks");
  }
  agree(group, "the groups of ShardedDataParallel's optimizers", lines);
  for (const auto* optimizer : optimizers) {
    if (ranks_over(*optimizer, group) != Over::others) continue;
    throw UsageError(
        fmt::format("ShardedDataParallel: the group of an OSS has ranks {} of the world, that of the wrapper ranks {}; "
                    "give both the same ranks in the same order, or OSS the wrapper's group by_host()",
                    fmt::join(world_ranks(optimizer->group()), ", "), fmt::join(world_ranks(group), ", ")));
  }
  if (std::adjacent_find(lines.begin(), lines.end(), std::not_equal_to<>()) != lines.end()) {
    throw UsageError(
        "ShardedDataParallel: one OSS has the wrapper's group and another one by_host(): give both the same");
  }
  const bool by_host = ranks_over(*optimizers.front(), group) == Over::host;
  if (!by_host) {
    std::vector<int> all(static_cast<size_t>(group.size()));
    std::iota(all.begin(), all.end(), 0);
    return make_shard_groups(group, {all});
  }
  return make_shard_groups(group, ranks_by_host(hosts_of(group)), optimizers.front()->group());
}

std::unique_ptr<GradientReduction> reduce_to_owners(const ShardGroups& groups, const BucketCaps& caps,
                                                    const std::vector<int>& owners) {
  if (!groups.replicated()) return std::make_unique<ReduceToOwner>(groups.all, caps, owners);
  auto plan = plan_in_groups(groups, SumResult::owner, caps);
  plan.divided = owners;
  plan.owners = owners;
  return std::make_unique<ReduceInGroups>(groups, std::move(plan));
}

}  // namespace shoal
