#include "strategy/zero/moved_sums.h"

#include <torch/utils.h>

#include <utility>

namespace shoal {

Owners owners_by_parameter(const std::vector<Gradient>& gradients, const std::vector<int>& owners) {
  Owners map;
  for (size_t i = 0; i < gradients.size(); ++i) map[gradients[i].parameter.unsafeGetTensorImpl()] = owners[i];
  return map;
}

void move_sums(const Group& group, const Reducer& reducer, const Owners& from, const Owners& to,
               AccumulatedGradients::Left& left) {
  const torch::NoGradGuard no_grad;
  std::vector<at::Tensor> moved;
  std::vector<int> here;
  for (const auto& gradient : reducer.gradients()) {
    const auto* parameter = gradient.parameter.unsafeGetTensorImpl();
    const auto before = from.find(parameter);
    if (before == from.end() || before->second == to.at(parameter)) continue;
    const auto& sum = left.gradients[parameter].sum;
    const bool mine = before->second == group.rank() && sum.exists;
    moved.push_back(gradient.parameter);
    here.push_back(mine && (sum.aside.defined() || gradient.parameter.grad().defined()) ? 1 : 0);
  }
  if (moved.empty()) return;
  const Label label{reducer.step(), -1, "sums of gradients that have another owner"};
  auto anywhere = at::tensor(here, at::kInt);
  group.all_reduce(anywhere, ReduceOp::max, label).wait();
  for (size_t i = 0; i < moved.size(); ++i) {
    const auto& parameter = moved[i];
    auto& sum = left.gradients[parameter.unsafeGetTensorImpl()].sum;
    sum.exists = anywhere.data_ptr<int>()[i] != 0;
    if (!sum.exists) continue;
    const int sender = from.at(parameter.unsafeGetTensorImpl());
    auto values = at::empty(parameter.sizes(), parameter.options().requires_grad(false));
    auto& grad = at::Tensor(parameter).mutable_grad();
    if (sender == group.rank()) {
      const auto own = sum.aside.defined() ? sum.aside : grad;
      values.copy_(own.is_sparse() ? own.to_dense() : own);
      if (!std::exchange(sum.aside, {}).defined()) grad.reset();
    }
    group.broadcast(values, sender, label).wait();
    if (to.at(parameter.unsafeGetTensorImpl()) != group.rank()) continue;
    (grad.defined() ? sum.aside : grad) = values;
  }
}

}  // namespace shoal
