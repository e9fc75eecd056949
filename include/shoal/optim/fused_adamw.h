#pragma once
// AdamW (Loshchilov and Hutter, 2019) in one pass over memory.

#include <torch/optim/adamw.h>

namespace shoal {

// torch::optim::AdamW with libtorch's fused kernel: the same options, the same state (so that it can be saved and
// loaded as the other one's), the same result up to rounding, a fraction of the time: the moments, the parameter and
// the gradient are read and written once instead of once per operator. Parameters and gradients must be dense, floating
// point and on one device per parameter group; UsageError otherwise, before anything has changed.
class FusedAdamW : public torch::optim::AdamW {
 public:
  using torch::optim::AdamW::AdamW;
  at::Tensor step(LossClosure closure = nullptr) override;
};

}  // namespace shoal
