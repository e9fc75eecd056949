#pragma once
// Adam (Kingma and Ba, 2015) in one pass over memory.

#include <torch/optim/adam.h>

namespace shoal {

// torch::optim::Adam with libtorch's fused kernel; otherwise as FusedAdamW.
class FusedAdam : public torch::optim::Adam {
 public:
  using torch::optim::Adam::Adam;
  at::Tensor step(LossClosure closure = nullptr) override;
};

}  // namespace shoal
