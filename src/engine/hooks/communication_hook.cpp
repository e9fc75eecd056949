#include "shoal/hooks.h"

#include <fmt/format.h>

#include "shoal/error.h"

namespace shoal {

void PendingExchange::complete() {
  work.wait();
  if (const auto compute = std::exchange(finish, {})) compute();
}

PendingExchange chain(PendingExchange first, std::function<PendingExchange()> next) {
  if (!first.next_stage) {
    first.next_stage = std::move(next);
  } else {
    first.next_stage = [next_stage = std::move(first.next_stage), next = std::move(next)] {
      return chain(next_stage(), next);
    };
  }
  return first;
}

void CommunicationHook::load_state(const State& state) {
  if (state.empty()) return;
  throw UsageError(fmt::format("communication hook {}: it has no state, so '{}' belongs to another hook", name(),
                               state.begin()->first));
}

Work sum_up(const GradientBucket& bucket, const at::Tensor& gradients, const at::Tensor& sum) {
  switch (bucket.result) {
    case SumResult::all_ranks:
      return bucket.group.all_reduce(gradients, ReduceOp::sum, bucket.label);
    case SumResult::ranges:
      return bucket.group.reduce_scatter(sum, gradients, ReduceOp::sum, bucket.label);
    case SumResult::owner:
      return bucket.group.reduce(gradients, bucket.owner, ReduceOp::sum, bucket.label);
  }
  return {};
}

}  // namespace shoal
