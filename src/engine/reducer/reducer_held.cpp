// Sums held back: micro-batches are summed within each host, and across hosts only together.

#include <torch/utils.h>

#include "engine/reducer/reducer.h"

namespace shoal {

// A step that is held back has no second stage; the next step adds what was held before its second stage.
PendingExchange Reducer::with_held(size_t index, PendingExchange sum) {
  if (!reduction_->plan().two_stages) return sum;
  if (entry_.holding) {
    sum.next_stage = {};
  } else if (auto held = accumulated_.sums().take_held(index); held.defined()) {
    sum.finish = [first = std::move(sum.finish), kept = buckets_[index].kept(), held = std::move(held)] {
      if (first) first();
      at::Tensor(kept).add_(held);
    };
  }
  return sum;
}

void Reducer::hold_back() {
  std::vector<bool> used(gradients_.size());
  buckets_.trailer().read(used, step_->came_anywhere);
  release_finished();
  for (size_t i = 0; i < buckets_.size(); ++i) {
    buckets_.drop_gradients(i);
    accumulated_.sums().hold(i, used);
  }
}

}  // namespace shoal
