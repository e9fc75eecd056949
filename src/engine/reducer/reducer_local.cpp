// What this rank's local backwards have left: hidden where sums are, and for those who change it before the reduction.

#include <torch/utils.h>

#include "engine/reducer/reducer.h"

namespace shoal {

void Reducer::hide_local_gradients() {
  if (options_.leave_grad) return;
  for (size_t i = 0; i < gradients_.size(); ++i) {
    if (used_[i]) earlier_.hide(i);
  }
}

at::Tensor Reducer::local_gradient(size_t gradient) {
  const std::lock_guard lock(mutex_);
  const torch::NoGradGuard no_grad;
  before_writing();
  adopt_changes();
  earlier_.set_aside(gradient);  // the place holds a part of the last sum
  auto& bucket = buckets_[places_[gradient].bucket];
  bucket.acquire(group_, spare_);
  const auto& view = bucket.view(places_[gradient].index);
  auto& grad = gradients_[gradient].parameter.mutable_grad();
  if (used_[gradient] && grad.defined()) {
    adopt_into_bucket(gradient);
  } else {
    at::Tensor(view).zero_();
    grad = view;
    used_[gradient] = true;
  }
  earlier_.added(gradient);
  local_ = true;
  return view;
}

}  // namespace shoal
