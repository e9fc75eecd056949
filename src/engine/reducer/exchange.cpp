#include "engine/reducer/exchange.h"

#include <algorithm>
#include <numeric>

namespace shoal {

bool facts_apart(const std::vector<Gradient>& gradients, bool carried) {
  const bool exact = std::any_of(gradients.begin(), gradients.end(), [](const Gradient& gradient) {
    return gradient.sparse || c10::elementSize(gradient.dtype()) >= 4;
  });
  return !carried || !exact;
}

FlatLayout scatter_layout(std::span<const int64_t> numels, size_t element_bytes, int ranks) {
  constexpr int64_t aligned_elements = 64;
  return {numels, element_bytes, aligned_elements * static_cast<int64_t>(element_bytes), ranks};
}

std::vector<std::vector<size_t>> AllReduce::plan(const std::vector<Gradient>& gradients,
                                                 std::span<const size_t> order) const {
  return plan_buckets(gradients, order, caps_.first_bytes, caps_.bytes);
}

PendingExchange AllReduce::reduce(Bucket& bucket, const Label& label) const {
  return {group_.all_reduce(bucket.flat(), ReduceOp::sum, label)};
}

std::vector<std::vector<size_t>> ReduceToOwner::plan(const std::vector<Gradient>& gradients,
                                                     std::span<const size_t> order) const {
  return plan_buckets(gradients, order, caps_.first_bytes, caps_.bytes, owners_, caps_.most_numel);
}

PendingExchange ReduceToOwner::reduce(Bucket& bucket, const Label& label) const {
  return {group_.reduce(bucket.flat(), owner(bucket), ReduceOp::sum, label)};
}

Range ReduceToOwner::kept(const Bucket& bucket, int rank) const {
  return owner(bucket) == rank ? Range{0, bucket.payload_numel()} : Range{};
}

std::vector<std::vector<size_t>> ReduceScatter::plan(const std::vector<Gradient>& gradients,
                                                     std::span<const size_t>) const {
  std::vector<size_t> order(gradients.size());
  std::iota(order.rbegin(), order.rend(), 0);
  return plan_buckets(gradients, order, caps_.first_bytes, caps_.bytes);
}

FlatLayout ReduceScatter::layout(std::span<const int64_t> numels, size_t element_bytes) const {
  return scatter_layout(numels, element_bytes, group_.size());
}

PendingExchange ReduceScatter::reduce(Bucket& bucket, const Label& label) const {
  return {group_.reduce_scatter(bucket.kept(), bucket.flat(), ReduceOp::sum, label)};
}

}  // namespace shoal
