// LocalUpdates when the ranks change.

#include <ATen/ops/full.h>
#include <torch/utils.h>

#include <algorithm>

#include "strategy/local_updates/state.h"

namespace shoal {

void LocalUpdates::State::regroup(const Group& to) {
  const torch::NoGradGuard no_grad;
  group = to;
  reducer.reset();  // destroy the old one first, because its hooks are on the same parameters
  set_steps(steps);
  if (reducer) reducer->count_from(steps);
  buffer_mean = {};
  // Only if all have adopted the changes: a death may have cut some off in that.
  auto adopted = at::full({1}, static_cast<int64_t>(changes_shared || !watch.changed()), at::kLong);
  group.all_reduce(adopted, ReduceOp::min, {steps, -1, "parameters that newcomers have as well"}).wait();
  if (adopted.item<int64_t>() == 1) note();
  changes_shared = false;
  const auto step = steps_exchanged - options.warmup_steps;
  for (size_t i = 0; i < fragments.size(); ++i) {
    fragments[i].mean() = {};
    if (fragments[i].under_way(step)) fragments[i].send(group, sent_as(steps, i));
  }
}

void LocalUpdates::State::give_mean(const Group& to, const std::vector<bool>& newcomers) {
  if (steps <= options.warmup_steps) return;  // ranks have the same values, which a mean might round
  const torch::NoGradGuard no_grad;
  const bool comes = newcomers[static_cast<size_t>(to.rank())];
  const auto givers = std::count(newcomers.begin(), newcomers.end(), false);
  const auto list = parameters();
  std::vector<at::ScalarType> dtypes;
  for (const auto& parameter : list) dtypes.push_back(widened(parameter.scalar_type()));
  const auto write = [&](size_t i, at::Tensor& out) { comes ? out.zero_() : out.copy_(list[i]); };
  Mean mean(to, list, dtypes, write, {steps, -1, "mean parameters for a newcomer"});
  const auto& values = mean.wait();
  if (!comes) return;
  for (size_t i = 0; i < list.size(); ++i) {
    list[i].copy_(values[i] * (static_cast<double>(to.size()) / static_cast<double>(givers)));
  }
  note();
}

LocalUpdates::State& state_of(LocalUpdates& updates) {
  return *updates.state_;
}

}  // namespace shoal
