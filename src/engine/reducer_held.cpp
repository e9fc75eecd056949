// Sums that are held back: micro-batches that are added up among the ranks of a host, and across hosts only together.

#include <torch/utils.h>

#include <algorithm>

#include "engine/reducer.h"
#include "shoal/base/error.h"

namespace shoal {

// Nothing goes further from a step that is held back; in the next, what was held goes along.
PendingExchange Reducer::with_held(size_t index, PendingExchange sum) {
  if (!exchange_->two_stages()) return sum;
  if (holding_) {
    sum.further = {};
  } else if (held_[index].defined()) {
    sum.finish = [first = std::move(sum.finish), kept = buckets_[index].kept(),
                  held = std::exchange(held_[index], {})] {
      if (first) first();
      at::Tensor(kept).add_(held);
    };
  }
  return sum;
}

void Reducer::hold_back() {
  for (size_t i = 0; i < buckets_.size(); ++i) {
    if (buckets_[i].kept_range().empty()) continue;
    const auto sum = buckets_[i].kept();
    held_[i] = held_[i].defined() ? held_[i].add_(sum) : sum.clone();
  }
  for (const auto& gradient : gradients_) at::Tensor(gradient.parameter).mutable_grad().reset();
  release_finished();
}

void Reducer::require_complete_sums() const {
  if (std::none_of(held_.begin(), held_.end(), [](const at::Tensor& held) { return held.defined(); })) return;
  throw UsageError(
      "gradients of micro-batches are added up within hosts only: run the last micro-batch's backward outside "
      "defer_all_reduce(), or drop them with zero_grad()");
}

}  // namespace shoal
