#include "engine/exchange.h"

namespace shoal {

std::vector<std::vector<size_t>> AllReduce::plan(const std::vector<Gradient>& gradients,
                                                 std::span<const size_t> order) const {
  return plan_buckets(gradients, order, caps_.first_bytes, caps_.bytes);
}

Work AllReduce::reduce(Bucket& bucket, const Label& label) const {
  return group_.all_reduce(bucket.flat(), ReduceOp::sum, label);
}

std::vector<std::vector<size_t>> ReduceToOwner::plan(const std::vector<Gradient>& gradients,
                                                     std::span<const size_t> order) const {
  return plan_buckets(gradients, order, caps_.first_bytes, caps_.bytes, owners_);
}

Work ReduceToOwner::reduce(Bucket& bucket, const Label& label) const {
  return group_.reduce(bucket.flat(), owner(bucket), ReduceOp::sum, label);
}

Range ReduceToOwner::kept(const Bucket& bucket) const {
  return owner(bucket) == group_.rank() ? Range{0, bucket.payload_numel()} : Range{};
}

}  // namespace shoal
