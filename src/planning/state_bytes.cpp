#include "planning/state_bytes.h"

#include <torch/utils.h>

#include "optim/param_groups.h"
#include "optim/state.h"

namespace shoal {

StateBytes::StateBytes(const OptimizerRecipe& recipe, const OptimizerRecipe::ParamGroups& groups)
    : recipe_(recipe), groups_(empty_like(groups)) {}

int64_t StateBytes::measured(at::IntArrayRef sizes, at::ScalarType dtype, size_t group) {
  const auto [known, is_new] = measured_.try_emplace({sizes.vec(), dtype, group}, 0);
  if (!is_new) return known->second;
  auto parameter = at::zeros(sizes, dtype).requires_grad_();
  parameter.mutable_grad() = at::zeros(sizes, dtype);
  auto groups = empty_like(groups_);
  groups.at(group).params().push_back(parameter);
  const auto optimizer = recipe_.make(groups);
  optimizer->step();
  for (const auto& tensor : state_tensors(*optimizer)) known->second += static_cast<int64_t>(tensor.nbytes());
  return known->second;
}

int64_t StateBytes::of(at::IntArrayRef sizes, at::ScalarType dtype, size_t group) {
  if (!recipe_.element_wise) return measured(sizes, dtype, group);
  constexpr int64_t few = 64;
  const auto one = measured({few}, dtype, group);
  const auto two = measured({2 * few}, dtype, group);
  const auto constant = 2 * one - two;
  return constant + (two - one) * c10::multiply_integers(sizes) / few;
}

}  // namespace shoal
