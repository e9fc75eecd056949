#include "engine/reducer/consumed_gradients.h"

#include <torch/utils.h>

#include <algorithm>
#include <utility>

namespace shoal {

ConsumedGradients::ConsumedGradients(const std::vector<Gradient>& gradients, BucketSet& buckets,
                                     GradientConsumer& consumer, std::string who, std::string about)
    : gradients_(gradients),
      buckets_(buckets),
      consumer_(consumer),
      spent_(gradients, std::move(who), std::move(about)) {}

bool ConsumedGradients::come_early() const {
  return !consumer_.needs_all() && knows_means_early();
}

// Whether a reduced bucket suffices to compute its mean: the weight rides in it, in a dtype that can hold it.
bool ConsumedGradients::knows_means_early() const {
  const auto exact = [](const Gradient& gradient) {
    return gradient.sparse || c10::elementSize(gradient.dtype()) >= 4;
  };
  return !buckets_.trailer().defined() && std::all_of(gradients_.begin(), gradients_.end(), exact);
}

void ConsumedGradients::take(size_t index) {
  auto parameters = buckets_.parameters_of(buckets_[index]);
  consumer_.take(parameters);
  for (auto& parameter : parameters) parameter.mutable_grad().reset();
}

void ConsumedGradients::take_all() {
  std::vector<at::Tensor> gradients;
  for (const auto& gradient : gradients_) {
    if (gradient.parameter.grad().defined()) gradients.push_back(gradient.parameter.grad());
  }
  consumer_.see_all(gradients);
  gradients.clear();
  for (size_t i = 0; i < buckets_.size(); ++i) {
    take(i);
    if (buckets_[i].transient()) buckets_.release(i);
  }
}

// After backward has ended: a gradient that arrives again before is reported as another error.
void ConsumedGradients::end_step(const std::vector<bool>& used) {
  consumer_.end_step(/*abandoned=*/false);
  for (size_t i = 0; i < gradients_.size(); ++i) {
    if (used[i]) spent_.leave(i);
  }
}

}  // namespace shoal
