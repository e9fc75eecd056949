#pragma once
// MLP: 784 -> hidden -> hidden -> 10, with GELU in its tanh form between the layers.

#include <torch/nn/modules/linear.h>

#include "models/model.h"

namespace shoal::models {

class Mlp : public Model {
 public:
  explicit Mlp(int64_t hidden);
  at::Tensor forward(at::Tensor input) override;
  std::vector<std::shared_ptr<torch::nn::Module>> units() const override;

 private:
  torch::nn::Linear fc1_, fc2_, fc3_;
};

}  // namespace shoal::models
