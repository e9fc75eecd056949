#include "engine/reducer/gradient_reduction.h"

#include <utility>

namespace shoal {
namespace {

ReductionPlan plan_of_owners(const Group& group, BucketCaps caps, std::vector<int> owners, bool follow) {
  ReductionPlan plan{.hook_point = {group, SumResult::owner}};
  plan.keeps = SumResult::owner;
  plan.caps = caps;
  plan.follows_order = follow;
  plan.divided = owners;
  plan.owners = std::move(owners);
  return plan;
}

ReductionPlan plan_of_ranges(const Group& group, BucketCaps caps) {
  ReductionPlan plan{.hook_point = {group, SumResult::ranges}};
  plan.keeps = SumResult::ranges;
  plan.caps = caps;
  plan.follows_order = false;
  plan.ranges = group.size();
  return plan;
}

}  // namespace

AllReduce::AllReduce(const Group& group, BucketCaps caps, bool consumed)
    : GradientReduction({.hook_point = {group, SumResult::all_ranks}, .caps = caps, .consumed = consumed}),
      group_(group) {}

PendingExchange AllReduce::reduce(Bucket& bucket, const Label& label) const {
  return {group_.all_reduce(bucket.flat(), ReduceOp::sum, label)};
}

ReduceToOwner::ReduceToOwner(const Group& group, BucketCaps caps, std::vector<int> owners, bool follow)
    : ReduceToOwner(group, plan_of_owners(group, caps, std::move(owners), follow)) {}

PendingExchange ReduceToOwner::reduce(Bucket& bucket, const Label& label) const {
  return {group_.reduce(bucket.flat(), plan().owners[bucket.members().front()], ReduceOp::sum, label)};
}

ReduceScatter::ReduceScatter(const Group& group, BucketCaps caps) : ReduceScatter(group, plan_of_ranges(group, caps)) {}

PendingExchange ReduceScatter::reduce(Bucket& bucket, const Label& label) const {
  return {group_.reduce_scatter(bucket.kept(), bucket.flat(), ReduceOp::sum, label)};
}

}  // namespace shoal
