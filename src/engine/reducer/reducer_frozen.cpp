// Gradients of parameters that are frozen at present; and what is left between steps.

#include <torch/utils.h>

#include <algorithm>

#include "engine/gradients/local_gradients.h"
#include "engine/reducer/reducer.h"
#include "shoal/error.h"

namespace shoal {

void Reducer::set_frozen(std::vector<bool> frozen) {
  frozen_ = std::move(frozen);
  mark_last();
}

// Which bucket a communication hook is told to be a step's last.
void Reducer::mark_last() {
  bool found = false;
  for (size_t i = buckets_.size(); i-- > 0;) {
    const bool leaves = !buckets_[i].sparse() && !rests(i);
    buckets_[i].set_last(leaves && !found);
    found = found || leaves;
  }
}

bool Reducer::rests(size_t bucket) const {
  const auto& members = buckets_[bucket].members();
  return std::all_of(members.begin(), members.end(), [this](size_t member) { return frozen_[member]; });
}

// Their places in buckets that travel are zero.
void Reducer::mark_frozen_ready() {
  for (size_t i = 0; i < buckets_.size(); ++i) {
    if (rests(i)) missing_[i] = 0;
  }
  for (size_t i = 0; i < gradients_.size(); ++i) {
    if (frozen_[i] && !rests(places_[i].bucket)) mark_ready(i);
  }
}

Reducer::Left Reducer::left() {
  const std::lock_guard lock(mutex_);
  const torch::NoGradGuard no_grad;
  adopt_changes();
  Left left{.weight = weight_};
  for (size_t i = 0; i < gradients_.size(); ++i) {
    left.gradients[gradients_[i].parameter.unsafeGetTensorImpl()] = {earlier_.left(i), used_[i]};
  }
  return left;
}

void Reducer::resume(const Left& left) {
  const torch::NoGradGuard no_grad;
  weight_ = left.weight;
  for (size_t i = 0; i < gradients_.size(); ++i) {
    const auto found = left.gradients.find(gradients_[i].parameter.unsafeGetTensorImpl());
    if (found == left.gradients.end()) continue;
    used_[i] = found->second.used && gradients_[i].parameter.grad().defined();
    adopt_into_bucket(i);
    if (used_[i]) {
      local_ = true;
      mark_local(gradients_[i].parameter);
    }
    const auto& bucket = buckets_[places_[i].bucket];
    earlier_.resume(i, found->second.sum, exchange_->keeps_whole(bucket, exchange_->place(group_.rank())));
  }
}

void Reducer::reduce_pending() {
  const std::lock_guard lock(mutex_);
  const torch::NoGradGuard no_grad;
  if (phase_ == Phase::running) throw UsageError("reduce: within a backward; call it between backward and step");
  before_writing();
  adopt_changes();
  for (size_t i = 0; i < gradients_.size(); ++i) {
    if (!earlier_.is_sum(i) && gradients_[i].parameter.grad().defined()) used_[i] = true;
  }
  in_backward_ = false;
  by_hand_ = true;
  begin_step();
  mark_rest_ready();
  end_backward();
}

}  // namespace shoal
