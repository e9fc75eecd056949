#include "engine/sharded/shard_groups.h"

#include <utility>

#include "comm/group/rank_groups.h"

namespace shoal {

PendingExchange ShardGroups::across_replicas(PendingExchange within, Bucket& bucket, const Label& label) const {
  if (!replicas || bucket.kept_range().empty()) return within;
  return chain(std::move(within), [group = *replicas, kept = bucket.kept(), label]() -> PendingExchange {
    return {group.all_reduce(kept, ReduceOp::sum, label)};
  });
}

HookPoint ShardGroups::hook_point(SumResult within) const {
  if (replicas || shard.size() == 1) return {replicas.value_or(shard), SumResult::all_ranks, /*of_kept=*/true};
  return {shard, within};
}

ShardGroups make_shard_groups(const Group& all, const std::vector<std::vector<int>>& ranks,
                              std::optional<Group> shard) {
  std::vector<int> places(static_cast<size_t>(all.size()));
  for (const auto& group : ranks) {
    for (size_t place = 0; place < group.size(); ++place) {
      places[static_cast<size_t>(group[place])] = static_cast<int>(place);
    }
  }
  const int owners = smallest(ranks);
  ShardGroups made{.all = all,
                   .shard = all,
                   .places = std::move(places),
                   .owners = owners,
                   .equal = owners * static_cast<int>(ranks.size()) == all.size()};
  if (ranks.size() == 1) return made;
  const auto here = hybrid_ranks(ranks, all.rank());
  made.shard = shard ? *shard : all.subgroup(here.inside);
  if (here.across.empty()) return made;
  made.replicas = here.across.size() == static_cast<size_t>(all.size()) ? all : all.subgroup(here.across);
  return made;
}

ReductionPlan plan_in_groups(const ShardGroups& groups, SumResult keeps, const BucketCaps& caps) {
  return {.hook_point = groups.hook_point(keeps),
          .keeps = keeps,
          .caps = caps,
          .ranges = groups.shard.size(),
          .places = groups.places,
          .two_stages = groups.replicated()};
}

PendingExchange ScatterInGroups::reduce(Bucket& bucket, const Label& label) const {
  return groups_.across_replicas(ReduceScatter::reduce(bucket, label), bucket, label);
}

PendingExchange ReduceInGroups::reduce(Bucket& bucket, const Label& label) const {
  return groups_.across_replicas(ReduceToOwner::reduce(bucket, label), bucket, label);
}

}  // namespace shoal
