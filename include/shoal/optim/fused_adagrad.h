#pragma once
// Adagrad (Duchi, Hazan and Singer, 2011) in one pass over memory.

#include <torch/optim/adagrad.h>

namespace shoal {

// torch::optim::Adagrad with libtorch's fused kernel; otherwise as FusedAdamW. Parameters that come with
// add_param_group train too (with the base class they have no state and its step fails).
class FusedAdagrad : public torch::optim::Adagrad {
 public:
  using torch::optim::Adagrad::Adagrad;
  at::Tensor step(LossClosure closure = nullptr) override;
};

}  // namespace shoal
