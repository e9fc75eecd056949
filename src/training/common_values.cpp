#include "training/common_values.h"

#include <torch/types.h>
#include <torch/utils.h>

namespace shoal {

CommonValues::CommonValues(Of of, const std::vector<at::Tensor>& tensors, const Group& group) {
  const torch::NoGradGuard no_grad;
  std::vector<at::Tensor> common;
  for (const auto& tensor : tensors) {
    if (of == Of::mean && !tensor.is_floating_point()) continue;
    // Double, so that the mean of equal values is exact.
    const auto dtype = of == Of::mean ? at::kDouble : tensor.scalar_type();
    common.push_back(tensor.detach().to(dtype, /*non_blocking=*/false, /*copy=*/true).contiguous());
    if (of == Of::mean) {
      group.all_reduce(common.back(), ReduceOp::avg, {-1, -1, "mean of the ranks"}).wait();
    } else {
      group.broadcast(common.back(), /*root=*/0, {-1, -1, "rank 0's values"}).wait();
    }
    own_.emplace_back(tensor, tensor.clone());
  }
  for (size_t i = 0; i < own_.size(); ++i) own_[i].first.variable_data().copy_(common[i]);
}

CommonValues::~CommonValues() {
  const torch::NoGradGuard no_grad;
  for (auto& [tensor, values] : own_) tensor.variable_data().copy_(values);
}

}  // namespace shoal
