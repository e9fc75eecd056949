#include "strategy/decentralized/micro_batches.h"

#include "memory/views.h"

namespace shoal {

void MicroBatches::add(size_t gradient) {
  if (!gradients_[gradient].parameter.grad().defined()) return;
  left_[gradient].some = true;
  any_ = true;
}

bool MicroBatches::has_values(size_t gradient) const {
  const auto& grad = gradients_[gradient].parameter.grad();
  return grad.defined() && !is_zero(grad);
}

// The last layers' gradients first, which are rarely zero.
void MicroBatches::note_values(bool look) {
  nonzero_ = !look;
  for (size_t i = gradients_.size(); i-- > 0;) {
    if (!left_[i].some) continue;
    nonzero_ = nonzero_ || has_values(i);
    left_[i].version = TensorVersion(gradients_[i].parameter.grad());
  }
}

bool MicroBatches::dropped() const {
  if (!any_) return false;
  for (size_t i = gradients_.size(); i-- > 0;) {
    const bool zeros_of_its_own = !nonzero_ && left_[i].some && !changed(i);
    if (left_[i].some && (zeros_of_its_own || has_values(i))) return false;
  }
  return true;
}

void MicroBatches::forget() {
  if (!any_) return;
  left_.assign(gradients_.size(), {});
  any_ = false;
  nonzero_ = false;
}

}  // namespace shoal
