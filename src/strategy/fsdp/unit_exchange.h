#pragma once
// Gradients that travel unit by unit, to where their units' shards are.

#include <limits>
#include <numeric>
#include <vector>

#include "engine/reducer/exchange.h"

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

// Buckets of one unit and dtype each, last unit first.
inline std::vector<std::vector<size_t>> plan_units(const std::vector<Gradient>& gradients,
                                                   const std::vector<int>& units) {
  constexpr auto whole = std::numeric_limits<int64_t>::max();
  std::vector<size_t> order(gradients.size());
  std::iota(order.rbegin(), order.rend(), 0);
  return plan_buckets(gradients, order, whole, whole, units);
}

// Every rank gets an equal range of a unit's sum, in memory of its own.
class ScatterUnits : public ReduceScatter {
 public:
  // units: number of the unit, by number of the gradient.
  ScatterUnits(ShardGroups groups, std::vector<int> units)
      : ReduceScatter(groups.shard, {}), groups_(std::move(groups)), units_(std::move(units)) {}

  std::vector<std::vector<size_t>> plan(const std::vector<Gradient>& gradients,
                                        std::span<const size_t>) const override {
    return plan_units(gradients, units_);
  }
  int place(int rank) const override { return groups_.places[rank]; }
  Range kept(const Bucket& bucket, int place) const override { return bucket.layout().part(place); }
  bool apart() const override { return true; }
  PendingExchange reduce(Bucket& bucket, const Label& label) const override {
    return groups_.across_replicas(ReduceScatter::reduce(bucket, label), bucket, label);
  }
  bool two_stages() const override { return groups_.replicas.has_value(); }
  HookPoint hook_point() const override { return groups_.hook_point(SumFor::parts); }

 private:
  ShardGroups groups_;
  std::vector<int> units_;
};

// Every gradient has an owner: for optimizers that need whole parameters.
class ReduceUnitsToOwners : public ReduceToOwner {
 public:
  ReduceUnitsToOwners(ShardGroups groups, const std::vector<int>& units, const std::vector<int>& owners)
      : ReduceToOwner(groups.shard, {}, owners, /*follow=*/false), groups_(std::move(groups)) {
    for (size_t i = 0; i < units.size(); ++i) shares_.push_back(units[i] * groups_.shard.size() + owners[i]);
  }

  std::vector<std::vector<size_t>> plan(const std::vector<Gradient>& gradients,
                                        std::span<const size_t>) const override {
    return plan_units(gradients, shares_);
  }
  int place(int rank) const override { return groups_.places[rank]; }
  PendingExchange reduce(Bucket& bucket, const Label& label) const override {
    return groups_.across_replicas(ReduceToOwner::reduce(bucket, label), bucket, label);
  }
  bool two_stages() const override { return groups_.replicas.has_value(); }
  HookPoint hook_point() const override { return groups_.hook_point(SumFor::owner); }

 private:
  ShardGroups groups_;
  std::vector<int> shares_;  // unit and owner in one number, by number of the gradient
};

}  // namespace shoal
