#pragma once
// How a model uses 16-bit arithmetic. After Micikevicius et al., "Mixed Precision Training" (ICLR 2018).

#include <torch/nn/module.h>
#include <torch/types.h>

#include <optional>

#include "shoal/optim/grad_scaler.h"

namespace shoal {

struct Precision {
  at::ScalarType parameters = at::kFloat;     // what the module holds
  std::optional<at::ScalarType> compute{};    // operators that gain from it run in this dtype (autocast)
  std::optional<GradScalerOptions> scaler{};  // of the loss, where gradients have float16's range

  static Precision float32() { return {}; }
  static Precision float64() { return {.parameters = at::kDouble}; }
  // Parameters, gradients and their sums stay float32.
  static Precision bf16_mixed() { return {.compute = at::kBFloat16}; }
  static Precision fp16_mixed() { return {.compute = at::kHalf, .scaler = GradScalerOptions{.initial_scale = 65536}}; }
  // Parameters have 16 bits. For strategies that keep float32 main copies of them; elsewhere small updates are lost.
  static Precision bf16() { return {.parameters = at::kBFloat16}; }
  static Precision fp16() { return {.parameters = at::kHalf, .scaler = GradScalerOptions{.initial_scale = 65536}}; }

  // The module's floating-point parameters and buffers get the dtype of `parameters`.
  void convert(torch::nn::Module& module) const { module.to(parameters); }
  // A floating-point input as the module takes it; others as they are.
  at::Tensor input(const at::Tensor& tensor) const {
    return tensor.is_floating_point() ? tensor.to(parameters) : tensor;
  }

  // While it lives, operators on `device` run as `compute` says; without compute it does nothing. Scopes nest. The
  // backward belongs outside: it uses the dtypes of the forward.
  class Scope {
   public:
    Scope(const Precision& precision, at::DeviceType device);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    bool active_;
    at::DeviceType device_;
    bool was_enabled_ = false;
    at::ScalarType dtype_before_ = at::kFloat;
  };
};

}  // namespace shoal
