#pragma once
// Groups of ranks that shard a model among them, each of which may have a copy of it: sums within a group, then between
// groups.

#include <optional>
#include <utility>
#include <vector>

#include "engine/reducer/gradient_reduction.h"

namespace shoal {

// Group of ranks that share one copy of the model, and the group of ranks that hold equal shards, if there are
// replicas.
struct ShardGroups {
  Group all;
  Group shard;
  std::optional<Group> replicas{};  // nothing on a rank that owns nothing
  std::vector<int> places{};        // by rank of `all`: its place in its shard group
  int owners = 0;     // of each shard group, so many ranks, the first ones, own shards: all of the smallest group
  bool equal = true;  // shard groups are equally large

  // Other ranks hold the same shards, or shards that are divided in the same way.
  bool replicated() const { return owners < all.size() || !equal; }

  // Chains the all-reduce over replicas to a sum within the shard group, where this rank keeps a part of it.
  PendingExchange across_replicas(PendingExchange within, Bucket& bucket, const Label& label) const;
  // The sum that a hook replaces: the one between hosts if there are replicas, or the only one if nothing is sharded.
  HookPoint hook_point(SumResult within) const;
};

// ranks: of each group, as ranks_by_host() returns them. shard: this rank's group of them; nothing: it is made.
// Collective over `all`.
ShardGroups make_shard_groups(const Group& all, const std::vector<std::vector<int>>& ranks,
                              std::optional<Group> shard = std::nullopt);

// Plan in which ranks keep sums of their shard group; without what it says of buckets' sizes and owners.
ReductionPlan plan_in_groups(const ShardGroups& groups, SumResult keeps, const BucketCaps& caps);

// Reduce-scatter within the shard group, then all-reduce of each range over the replicas. Groups are equally large.
class ScatterInGroups : public ReduceScatter {
 public:
  ScatterInGroups(const ShardGroups& groups, ReductionPlan plan)
      : ReduceScatter(groups.shard, std::move(plan)), groups_(groups) {}
  PendingExchange reduce(Bucket& bucket, const Label& label) const override;

 private:
  ShardGroups groups_;
};

// Reduce to the owner within the shard group, then all-reduce over the owners of the replicas. A bucket has one owner.
class ReduceInGroups : public ReduceToOwner {
 public:
  ReduceInGroups(const ShardGroups& groups, ReductionPlan plan)
      : ReduceToOwner(groups.shard, std::move(plan)), groups_(groups) {}
  PendingExchange reduce(Bucket& bucket, const Label& label) const override;

 private:
  ShardGroups groups_;
};

}  // namespace shoal
