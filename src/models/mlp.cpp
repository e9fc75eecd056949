#include "models/mlp.h"

#include <ATen/ops/gelu.h>

namespace shoal::models {

Mlp::Mlp(int64_t hidden) : fc1_(784, hidden), fc2_(hidden, hidden), fc3_(hidden, 10) {
  register_module("fc1", fc1_);
  register_module("fc2", fc2_);
  register_module("fc3", fc3_);
}

at::Tensor Mlp::forward(at::Tensor input) {
  const auto x = at::gelu(fc1_(input), "tanh");
  return fc3_(at::gelu(fc2_(x), "tanh"));
}

std::vector<std::shared_ptr<torch::nn::Module>> Mlp::units() const {
  return {fc1_.ptr(), fc2_.ptr(), fc3_.ptr()};
}

}  // namespace shoal::models
