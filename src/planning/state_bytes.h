#pragma once
// Memory of an optimizer's state, measured on tensors that it steps once.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <tuple>
#include <vector>

#include "shoal/strategy.h"

namespace shoal {

// Bytes that an optimizer keeps for a parameter beside its value. Of an element-wise optimizer they are a linear
// function of the number of elements, which small tensors show; of others each shape is measured once.
class StateBytes {
 public:
  // groups: the param groups, of whose options each shows its own state.
  StateBytes(const OptimizerRecipe& recipe, const OptimizerRecipe::ParamGroups& groups);

  // For a parameter of these sizes, or an element-wise optimizer's piece of one, in param group `group`. UsageError if
  // the optimizer's state is not registered.
  int64_t of(at::IntArrayRef sizes, at::ScalarType dtype, size_t group);

 private:
  int64_t measured(at::IntArrayRef sizes, at::ScalarType dtype, size_t group);

  OptimizerRecipe recipe_;
  OptimizerRecipe::ParamGroups groups_;  // without parameters
  std::map<std::tuple<std::vector<int64_t>, at::ScalarType, size_t>, int64_t> measured_;
};

}  // namespace shoal
