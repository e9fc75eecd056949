#include "tests/conformance/trained.h"

#include <algorithm>

namespace shoal::test {

std::vector<at::Tensor> distinct(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> list;
  for (const auto& parameter : parameters) {
    const bool seen = std::any_of(list.begin(), list.end(), [&](const at::Tensor& t) { return t.is_same(parameter); });
    if (!seen) list.push_back(parameter);
  }
  return list;
}

ParamGroups groups_of(const Setup& setup, const torch::nn::Module& module) {
  if (setup.groups) return setup.groups();
  return {torch::optim::OptimizerParamGroup(distinct(module.parameters()))};
}

std::vector<at::Tensor> gradients_of(const torch::nn::Module& module) {
  std::vector<at::Tensor> list;
  for (const auto& parameter : distinct(module.parameters())) {
    if (parameter.grad().defined()) list.push_back(parameter.grad());
  }
  return list;
}

void set_trainable(torch::nn::Module& module, bool trainable) {
  for (auto& parameter : module.parameters()) parameter.set_requires_grad(trainable);
}

}  // namespace shoal::test
