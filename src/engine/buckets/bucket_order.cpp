#include "engine/buckets/bucket_order.h"

#include <algorithm>

namespace shoal {

void BucketOrder::learn(const std::vector<size_t>& order, int from) {
  if (learnt_) return;
  learnt_ = Learnt{order, from};
  due_ = follows_;
}

const std::vector<size_t>& BucketOrder::agree(const Group& group, size_t gradients, int64_t step) {
  due_ = false;
  auto& order = learnt_->order;
  std::vector<bool> listed(gradients);
  for (const auto i : order) listed[i] = true;
  for (size_t i = gradients; i-- > 0;) {
    if (!listed[i]) order.push_back(i);
  }
  auto shared = at::empty({static_cast<int64_t>(order.size())}, at::kLong);
  std::copy(order.begin(), order.end(), shared.data_ptr<int64_t>());
  group.broadcast(shared, learnt_->from, {step, -1, "order of gradients"}).wait();
  const auto* begin = shared.data_ptr<int64_t>();
  order.assign(begin, begin + shared.numel());
  followed_ = true;
  return order;
}

std::optional<BucketOrder::Learnt> BucketOrder::learnt() const {
  return follows_ ? learnt_ : std::nullopt;
}

bool BucketOrder::resume_from(const std::optional<Learnt>& learnt) {
  if (!follows_) return false;
  const bool other = !learnt && learnt_ && !due_;
  learnt_ = learnt;
  due_ = learnt.has_value();
  return other;
}

}  // namespace shoal
