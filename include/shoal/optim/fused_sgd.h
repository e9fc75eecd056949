#pragma once
// Stochastic gradient descent, with or without (Nesterov) momentum, in one pass over memory.

#include <torch/optim/sgd.h>

namespace shoal {

// torch::optim::SGD with libtorch's fused kernel; otherwise as FusedAdamW. 16-bit parameters on the CPU are updated by
// separate operators instead: libtorch 2.13's kernel leaves most of their elements as they are.
class FusedSGD : public torch::optim::SGD {
 public:
  using torch::optim::SGD::SGD;
  at::Tensor step(LossClosure closure = nullptr) override;
};

}  // namespace shoal
