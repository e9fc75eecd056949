// Sums that are held back: micro-batches that are added up among the ranks of a host, and across hosts only together.

#include <torch/utils.h>

#include <algorithm>

#include "engine/reducer/reducer.h"
#include "shoal/error.h"

namespace shoal {

// Nothing goes further from a step that is held back; in the next, what was held goes along.
PendingExchange Reducer::with_held(size_t index, PendingExchange sum) {
  if (!exchange_->two_stages()) return sum;
  if (holding_) {
    sum.further = {};
  } else if (auto held = earlier_.take_held(index); held.defined()) {
    sum.finish = [first = std::move(sum.finish), kept = buckets_[index].kept(), held = std::move(held)] {
      if (first) first();
      at::Tensor(kept).add_(held);
    };
  }
  return sum;
}

void Reducer::hold_back() {
  std::vector<bool> used(gradients_.size());
  facts_.read(used, came_anywhere_);
  release_finished();
  for (size_t i = 0; i < buckets_.size(); ++i) {
    drop_gradients(i);
    earlier_.hold(i, used);
  }
}

void Reducer::require_complete_sums() const {
  if (!earlier_.holds_any()) return;
  throw UsageError(
      "gradients of micro-batches are added up within hosts only: run the last micro-batch's backward outside "
      "defer_all_reduce(), or drop them with zero_grad()");
}

}  // namespace shoal
