#pragma once
// Interface of the built-in models.

#include <torch/nn/module.h>

#include <memory>
#include <vector>

namespace shoal::models {

class Model : public torch::nn::Module {
 public:
  // Logits of a batch: [n, 10] of images float [n, 784]; [n, t, 256] of tokens int64 [n, t].
  virtual at::Tensor forward(at::Tensor input) = 0;
  // Submodules that a sharding strategy treats as one unit each, in the order of their use.
  virtual std::vector<std::shared_ptr<torch::nn::Module>> units() const = 0;
};

}  // namespace shoal::models
