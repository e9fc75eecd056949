#pragma once
// Gradients that travel unit by unit, to where their units' shards are.

#include <limits>
#include <vector>

#include "engine/reducer/gradient_reduction.h"

namespace shoal {

// The ranks among which units are sharded, and, where there are several such groups, those that hold equal shards.
struct ShardGroups {
  Group all;
  Group shard;
  std::optional<Group> replicas{};
  std::vector<int> places{};  // in `shard` and its likes, by rank of `all`

  // What is left of a sum within `shard` where this rank keeps something of it.
  PendingExchange across_replicas(PendingExchange within, Bucket& bucket, const Label& label) const {
    if (!replicas || bucket.kept_range().empty()) return within;
    return chain(std::move(within), [group = *replicas, kept = bucket.kept(), label]() -> PendingExchange {
      return {group.all_reduce(kept, ReduceOp::sum, label)};
    });
  }
  // A hook takes the way that is long: between hosts, and where nothing is sharded.
  HookPoint hook_point(SumFor within) const {
    if (replicas || shard.size() == 1) return {replicas.value_or(shard), SumFor::everybody, /*of_kept=*/true};
    return {shard, within};
  }
};

// Buckets of one unit and dtype each, last unit first; sums are kept by the ranks of a shard group. divided: by gradient,
// of the unit.
inline ReductionPlan plan_units(ReductionPlan::Keeps keeps, const ShardGroups& groups, std::vector<int> divided) {
  constexpr auto whole = std::numeric_limits<int64_t>::max();
  return {.hook_point = groups.hook_point(keeps == ReductionPlan::Keeps::owned ? SumFor::owner : SumFor::parts),
          .keeps = keeps,
          .caps = {.first_bytes = whole, .bytes = whole},
          .follows_order = false,
          .divided = std::move(divided),
          .ranges = groups.shard.size(),
          .places = groups.places,
          .two_stages = groups.replicas.has_value()};
}

// Every rank gets an equal range of a unit's sum, in memory of its own.
class ScatterUnits : public ReduceScatter {
 public:
  // units: number of the unit, by number of the gradient.
  ScatterUnits(const ShardGroups& groups, const std::vector<int>& units)
      : ReduceScatter(groups.shard, planned(groups, units)), groups_(groups) {}

  PendingExchange reduce(Bucket& bucket, const Label& label) const override {
    return groups_.across_replicas(ReduceScatter::reduce(bucket, label), bucket, label);
  }

 private:
  static ReductionPlan planned(const ShardGroups& groups, const std::vector<int>& units) {
    auto plan = plan_units(ReductionPlan::Keeps::ranges, groups, units);
    plan.own_memory = true;
    return plan;
  }

  ShardGroups groups_;
};

// Every gradient has an owner: for optimizers that need whole parameters.
class ReduceUnitsToOwners : public ReduceToOwner {
 public:
  ReduceUnitsToOwners(const ShardGroups& groups, const std::vector<int>& units, const std::vector<int>& owners)
      : ReduceToOwner(groups.shard, planned(groups, units, owners)), groups_(groups) {}

  PendingExchange reduce(Bucket& bucket, const Label& label) const override {
    return groups_.across_replicas(ReduceToOwner::reduce(bucket, label), bucket, label);
  }

 private:
  // A bucket has one unit and one owner.
  static ReductionPlan planned(const ShardGroups& groups, const std::vector<int>& units,
                               const std::vector<int>& owners) {
    std::vector<int> shares;
    for (size_t i = 0; i < units.size(); ++i) shares.push_back(units[i] * groups.shard.size() + owners[i]);
    auto plan = plan_units(ReductionPlan::Keeps::owned, groups, std::move(shares));
    plan.owners = owners;
    return plan;
  }

  ShardGroups groups_;
};

}  // namespace shoal
