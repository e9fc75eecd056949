#include "engine/reducer/gradient_reduction.h"

namespace shoal {

AllReduce::AllReduce(const Group& group, BucketCaps caps, bool consumed)
    : GradientReduction({.hook_point = {group, SumFor::everybody}, .caps = caps, .consumed = consumed}),
      group_(group) {}

PendingExchange AllReduce::reduce(Bucket& bucket, const Label& label) const {
  return {group_.all_reduce(bucket.flat(), ReduceOp::sum, label)};
}

ReduceToOwner::ReduceToOwner(const Group& group, BucketCaps caps, std::vector<int> owners, bool follow)
    : ReduceToOwner(group, {.hook_point = {group, SumFor::owner},
                            .keeps = ReductionPlan::Keeps::owned,
                            .caps = caps,
                            .follows_order = follow,
                            .divided = owners,
                            .owners = owners}) {}

PendingExchange ReduceToOwner::reduce(Bucket& bucket, const Label& label) const {
  return {group_.reduce(bucket.flat(), plan().owners[bucket.members().front()], ReduceOp::sum, label)};
}

ReduceScatter::ReduceScatter(const Group& group, BucketCaps caps)
    : ReduceScatter(group, {.hook_point = {group, SumFor::parts},
                            .keeps = ReductionPlan::Keeps::ranges,
                            .caps = caps,
                            .follows_order = false,
                            .ranges = group.size()}) {}

PendingExchange ReduceScatter::reduce(Bucket& bucket, const Label& label) const {
  return {group_.reduce_scatter(bucket.kept(), bucket.flat(), ReduceOp::sum, label)};
}

}  // namespace shoal
