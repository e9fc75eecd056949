#include "cli/mean_of_ranks.h"

#include <torch/types.h>
#include <torch/utils.h>

namespace shoal::cli {

MeanOfRanks::MeanOfRanks(const std::vector<at::Tensor>& tensors, const Group& group) {
  const torch::NoGradGuard no_grad;
  std::vector<at::Tensor> means;
  for (const auto& tensor : tensors) {
    if (!tensor.is_floating_point()) continue;
    // In doubles, so that equal values have themselves as their mean.
    means.push_back(tensor.detach().to(at::kDouble, /*non_blocking=*/false, /*copy=*/true).contiguous());
    group.all_reduce(means.back(), ReduceOp::avg, {-1, -1, "mean of the ranks"}).wait();
    own_.emplace_back(tensor, tensor.clone());
  }
  for (size_t i = 0; i < own_.size(); ++i) own_[i].first.variable_data().copy_(means[i]);
}

MeanOfRanks::~MeanOfRanks() {
  const torch::NoGradGuard no_grad;
  for (auto& [tensor, values] : own_) tensor.variable_data().copy_(values);
}

}  // namespace shoal::cli
