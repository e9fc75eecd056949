#pragma once
// Model whose gradients need no padding, so that bytes can be counted.

#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <torch/utils.h>

namespace shoal::test {

// Three gradients with multiples of 64 * 12 elements, which need no padding on 1 to 4 ranks.
struct EvenImpl : torch::nn::Module {
  EvenImpl() {
    torch::manual_seed(3);
    first = register_module("first", torch::nn::Linear(torch::nn::LinearOptions(16, 48).bias(false)));
    second = register_module("second", torch::nn::Linear(torch::nn::LinearOptions(48, 48).bias(false)));
    third = register_module("third", torch::nn::Linear(torch::nn::LinearOptions(48, 16).bias(false)));
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) {
    if (fails) throw std::runtime_error("it fails here");
    return third(torch::tanh(second(torch::tanh(first(x)))));
  }

  torch::nn::Linear first{nullptr}, second{nullptr}, third{nullptr};
  bool fails = false;
};
inline constexpr int64_t even_gradients = 3;
inline constexpr int64_t even_payload = (48 * 16 + 48 * 48 + 16 * 48) * 8;  // bytes

}  // namespace shoal::test
