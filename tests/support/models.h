#pragma once
// Small models for tests, and the arithmetic to compare them.

#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <functional>
#include <memory>

namespace shoal::test {

// Device of the tests' models and batches: of the option --device, see world_main.cpp.
inline at::Device& test_device() {
  static at::Device device = at::kCPU;
  return device;
}

// Collectives of a step of DistributedDataParallel beside its buckets': on a device, flags and weight travel apart.
inline int64_t trailers_apart() {
  return test_device().is_cpu() ? 0 : 1;
}

struct MlpImpl : torch::nn::Module {
  explicit MlpImpl(int64_t in = 12, int64_t hidden = 16, int64_t out = 5, at::ScalarType dtype = at::kDouble) {
    first = register_module("first", torch::nn::Linear(in, hidden));
    second = register_module("second", torch::nn::Linear(hidden, hidden));
    third = register_module("third", torch::nn::Linear(hidden, out));
    to(test_device(), dtype);
  }
  at::Tensor forward(at::Tensor x) { return third(torch::tanh(second(torch::tanh(first(x))))); }

  torch::nn::Linear first{nullptr}, second{nullptr}, third{nullptr};
};
TORCH_MODULE(Mlp);

inline Mlp seeded(int seed) {
  torch::manual_seed(seed);
  return Mlp();
}

inline at::Tensor mean_loss(const at::Tensor& output) {
  return output.pow(2).mean();
}

// Inputs of one rank in one step and micro-batch; the same in every call.
inline at::Tensor batch(int rank, int64_t step, int64_t micro = 0, int64_t samples = 4, int64_t in = 12) {
  auto generator = at::detail::createCPUGenerator(1000003 * step + 1009 * micro + rank + 1);
  return at::randn({samples, in}, generator, at::kDouble).to(test_device());
}

// Largest difference between two lists of tensors, relative to the largest element.
inline double difference(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  double worst = a.size() == b.size() ? 0 : INFINITY;
  for (size_t i = 0; i < a.size() && i < b.size(); ++i) {
    if (a[i].numel() == 0) continue;
    const auto x = a[i].detach().to(at::kCPU, at::kDouble);
    const auto y = b[i].detach().to(at::kCPU, at::kDouble);
    const double scale = std::max(1e-30, y.abs().max().item<double>());
    worst = std::max(worst, (x - y).abs().max().item<double>() / scale);
  }
  return worst;
}

inline std::vector<at::Tensor> gradients(const torch::nn::Module& module) {
  std::vector<at::Tensor> list;
  for (const auto& parameter : module.parameters()) {
    list.push_back(parameter.grad().defined() ? parameter.grad().clone() : at::Tensor());
  }
  return list;
}

// Copies of the parameters.
inline std::vector<at::Tensor> copies(const torch::nn::Module& module) {
  std::vector<at::Tensor> list;
  for (const auto& parameter : module.parameters()) list.push_back(parameter.detach().clone());
  return list;
}

}  // namespace shoal::test
