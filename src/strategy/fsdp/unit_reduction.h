#pragma once
// Reduction of gradients unit by unit, to the ranks that own the units' shards.

#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "engine/sharded/shard_groups.h"

namespace shoal {

// Sizes of the buckets of a unit: one bucket per dtype. small: ranks share memory, so that nothing is gathered unit by
// unit, and no hook sums the buckets.
inline BucketCaps unit_caps(bool small) {
  constexpr auto whole = std::numeric_limits<int64_t>::max();
  if (!small) return {.first_bytes = whole, .bytes = whole};
  return {
      .first_bytes = max_transient_bucket_bytes,
      .bytes = max_transient_bucket_bytes,
      .most_numel = max_transient_bucket_bytes / static_cast<int64_t>(sizeof(float)) / 4 * 5};  // a weight and its bias
}

// No bucket has gradients of two units; last unit first. Ranks of a shard group keep the sums. divided: by gradient,
// see ReductionPlan.
inline ReductionPlan plan_units(SumResult keeps, const ShardGroups& groups, const BucketCaps& caps,
                                std::vector<int> divided) {
  auto plan = plan_in_groups(groups, keeps, caps);
  plan.follows_order = false;
  plan.divided = std::move(divided);
  return plan;
}

// Reduce-scatter: every rank gets an equal range of a unit's sum, in memory of its own. units: index of the unit, by
// gradient.
inline std::unique_ptr<GradientReduction> scatter_units(const ShardGroups& groups, const BucketCaps& caps,
                                                        const std::vector<int>& units) {
  auto plan = plan_units(SumResult::ranges, groups, caps, units);
  plan.own_memory = true;
  return std::make_unique<ScatterInGroups>(groups, std::move(plan));
}

// Reduce to owners: every gradient has one owner, for optimizers that need whole parameters. A bucket has one unit and
// one owner.
inline std::unique_ptr<GradientReduction> reduce_units_to_owners(const ShardGroups& groups, const BucketCaps& caps,
                                                                 const std::vector<int>& units,
                                                                 const std::vector<int>& owners) {
  std::vector<int> shares;
  for (size_t i = 0; i < units.size(); ++i) shares.push_back(units[i] * groups.shard.size() + owners[i]);
  auto plan = plan_units(SumResult::owner, groups, caps, std::move(shares));
  plan.owners = owners;
  return std::make_unique<ReduceInGroups>(groups, std::move(plan));
}

}  // namespace shoal
