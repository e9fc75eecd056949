#pragma once
// Reduction of gradients unit by unit, to the ranks that own the units' shards.

#include <limits>
#include <vector>

#include "engine/sharded/shard_groups.h"

namespace shoal {

// Sizes of the buckets of a unit: one bucket per dtype. small: ranks share memory, so that nothing is gathered unit by
// unit, and no hook sums the buckets.
inline BucketCaps unit_caps(bool small) {
  constexpr auto whole = std::numeric_limits<int64_t>::max();
  if (!small) return {.first_bytes = whole, .bytes = whole};
  return {.first_bytes = passing_bucket_bytes,
          .bytes = passing_bucket_bytes,
          .most_numel = passing_bucket_bytes / static_cast<int64_t>(sizeof(float)) / 4 * 5};  // a weight and its bias
}

// No bucket has gradients of two units; last unit first. Ranks of a shard group keep the sums. divided: unit, by gradient.
inline ReductionPlan plan_units(ReductionPlan::Keeps keeps, const ShardGroups& groups, const BucketCaps& caps,
                                std::vector<int> divided) {
  return {.hook_point = groups.hook_point(keeps == ReductionPlan::Keeps::owned ? SumFor::owner : SumFor::parts),
          .keeps = keeps,
          .caps = caps,
          .follows_order = false,
          .divided = std::move(divided),
          .ranges = groups.shard.size(),
          .places = groups.places,
          .two_stages = groups.replicated()};
}

// Reduce-scatter: every rank gets an equal range of a unit's sum, in memory of its own.
class ScatterUnits : public ReduceScatter {
 public:
  // units: index of the unit, by gradient.
  ScatterUnits(const ShardGroups& groups, const BucketCaps& caps, const std::vector<int>& units)
      : ReduceScatter(groups.shard, planned(groups, caps, units)), groups_(groups) {}

  PendingExchange reduce(Bucket& bucket, const Label& label) const override {
    return groups_.across_replicas(ReduceScatter::reduce(bucket, label), bucket, label);
  }

 private:
  static ReductionPlan planned(const ShardGroups& groups, const BucketCaps& caps, const std::vector<int>& units) {
    auto plan = plan_units(ReductionPlan::Keeps::ranges, groups, caps, units);
    plan.own_memory = true;
    return plan;
  }

  ShardGroups groups_;
};

// Reduce to owners: every gradient has one owner, for optimizers that need whole parameters.
class ReduceUnitsToOwners : public ReduceToOwner {
 public:
  ReduceUnitsToOwners(const ShardGroups& groups, const BucketCaps& caps, const std::vector<int>& units,
                      const std::vector<int>& owners)
      : ReduceToOwner(groups.shard, planned(groups, caps, units, owners)), groups_(groups) {}

  PendingExchange reduce(Bucket& bucket, const Label& label) const override {
    return groups_.across_replicas(ReduceToOwner::reduce(bucket, label), bucket, label);
  }

 private:
  // A bucket has one unit and one owner.
  static ReductionPlan planned(const ShardGroups& groups, const BucketCaps& caps, const std::vector<int>& units,
                               const std::vector<int>& owners) {
    std::vector<int> shares;
    for (size_t i = 0; i < units.size(); ++i) shares.push_back(units[i] * groups.shard.size() + owners[i]);
    auto plan = plan_units(ReductionPlan::Keeps::owned, groups, caps, std::move(shares));
    plan.owners = owners;
    return plan;
  }

  ShardGroups groups_;
};

}  // namespace shoal
