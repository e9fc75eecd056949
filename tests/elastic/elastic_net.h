#pragma once
// Small net that the elastic tests train, its loss, and hashes of what has been trained.

#include <torch/nn/modules/linear.h>
#include <torch/optim/optimizer.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <cstdint>
#include <vector>

#include "engine/changes/changed_values.h"
#include "shoal/optimizer_state.h"

namespace shoal::test {

// In training it uses random numbers in forward, and counts its forwards in a buffer.
struct Net : torch::nn::Module {
  explicit Net(int64_t width = 24) {
    torch::manual_seed(7);
    first = register_module("first", torch::nn::Linear(4, width));
    second = register_module("second", torch::nn::Linear(width, width));
    third = register_module("third", torch::nn::Linear(width, 1));
    forwards = register_buffer("forwards", at::zeros({1}, at::kLong));
  }
  at::Tensor forward(const at::Tensor& x) {
    if (is_training()) forwards.add_(1);
    const auto noisy = is_training() ? x + 0.01 * at::randn_like(x) : x;
    return third(at::tanh(second(at::tanh(first(noisy)))));
  }
  void to_dtype(at::ScalarType dtype) {
    for (auto layer : {first, second, third}) layer->to(dtype);
  }
  // Takes the parameters of `copies` in this net's dtype.
  void round(const Net& copies) {
    const torch::NoGradGuard no_grad;
    const auto from = copies.parameters();
    auto to = parameters();
    for (size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i]);
  }
  torch::nn::Linear first{nullptr}, second{nullptr}, third{nullptr};
  at::Tensor forwards;
};

inline at::Tensor inputs_of(const std::vector<size_t>& samples) {
  auto x = at::empty({static_cast<int64_t>(samples.size()), 4});
  auto* next = x.mutable_data_ptr<float>();
  for (const auto sample : samples) {
    for (size_t j = 0; j < 4; ++j)
      *next++ = static_cast<float>(static_cast<double>((sample * 37 + j * 11) % 101) / 50 - 1);
  }
  return x;
}

inline at::Tensor loss_of(const at::Tensor& y, const at::Tensor& x) {
  return (y.squeeze(1) - x.sum(1)).square().mean();
}

class Hash {
 public:
  void add(const at::Tensor& tensor) { value = (value ^ digest_of(tensor)) * 1099511628211U; }
  uint64_t value = 14695981039346656037U;
};

inline uint64_t hash_of(const OptimizerState& whole, const torch::nn::Module& module) {
  Hash hash;
  for (const auto& parameter : module.parameters()) hash.add(parameter);
  for (const auto& [name, state] : whole) {
    for (const auto& [field, tensor] : state.tensors) hash.add(tensor);
    for (const auto& [field, number] : state.numbers) hash.add(at::scalar_tensor(number, at::kDouble));
  }
  return hash.value;
}

// For what is not equal to the bit.
inline double sum_of(const torch::nn::Module& module) {
  double sum = 0;
  for (const auto& parameter : module.parameters())
    sum += parameter.detach().to(at::kDouble).abs().sum().item<double>();
  return sum;
}

inline uint64_t hash_of(const torch::optim::Optimizer& optimizer, const torch::nn::Module& module) {
  return hash_of(optimizer_state(optimizer, module), module);
}

}  // namespace shoal::test
