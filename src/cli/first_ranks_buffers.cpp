#include "cli/first_ranks_buffers.h"

#include <torch/utils.h>

namespace shoal::cli {

FirstRanksBuffers::FirstRanksBuffers(const std::vector<at::Tensor>& buffers, const Group& group) {
  const torch::NoGradGuard no_grad;
  std::vector<at::Tensor> firsts;
  for (const auto& buffer : buffers) {
    firsts.push_back(buffer.detach().clone(at::MemoryFormat::Contiguous));
    group.broadcast(firsts.back(), /*root=*/0, {-1, -1, "buffers to evaluate with"}).wait();
    own_.emplace_back(buffer, buffer.clone());
  }
  for (size_t i = 0; i < own_.size(); ++i) own_[i].first.variable_data().copy_(firsts[i]);
}

FirstRanksBuffers::~FirstRanksBuffers() {
  const torch::NoGradGuard no_grad;
  for (auto& [buffer, values] : own_) buffer.variable_data().copy_(values);
}

}  // namespace shoal::cli
