#pragma once
// Mixed precision: dtypes and the gradient scaler.

#include <ATen/core/Tensor.h>
#include <cstdint>
#include <optional>
#include <torch/nn/module.h>
#include <torch/types.h>
#include <vector>

namespace shoal {

// Loss scaling, so that gradients of 16 bits do not vanish. After Micikevicius et al., "Mixed Precision Training" (ICLR
// 2018); the dynamic scale with hysteresis is Megatron-LM's DynamicGradScaler.

struct GradScalerOptions {
  double initial_scale = 4294967296.0;  // 2^32, as Megatron; torch.amp starts at 65536
  bool dynamic = true;                  // false: the scale stays, whatever the gradients are

  // Of the dynamic scale. torch.amp has a growth interval of 2000 and a hysteresis of 1.
  double growth_factor = 2;
  double backoff_factor = 0.5;
  int64_t growth_interval = 1000;  // steps in a row without inf or NaN after which the scale grows
  int64_t hysteresis = 2;  // steps with inf or NaN until the scale shrinks; counts anew only when the scale has grown
  double min_scale = 1;

  // Throws UsageError that lists all faults.
  void validate() const;
};

// What a checkpoint keeps.
struct GradScalerState {
  double scale = 0;
  int64_t good_steps = 0;       // in a row
  int64_t hysteresis_left = 0;  // steps with inf or NaN until the scale shrinks
};

// Usage in one step; the strategies do this for their optimizers:
//
//   scaler.scale(loss).backward();
//   const bool found = any_rank(scaler.unscale(gradients));
//   if (!found) optimizer.step();
//   scaler.update(found);
//
// Not collective: that all ranks agree on `found` is the caller's part; with equal calls of update() the ranks' scales
// stay equal. Not thread-safe.
class GradScaler {
 public:
  explicit GradScaler(const GradScalerOptions& options = {});

  double value() const { return state_.scale; }
  // The loss times the scale; part of the graph.
  at::Tensor scale(const at::Tensor& loss) const;
  // Divides the gradients by the scale, in place; true if one of their elements was inf or NaN, here on this rank.
  // Undefined gradients are skipped, those that share memory must be given once. The factor is rounded to float32:
  // exact for powers of two, which the default factors give. UsageError for integers.
  bool unscale(const std::vector<at::Tensor>& gradients) const;
  // After each step, with what holds for all ranks. A dynamic scale neither leaves float32's range nor falls below
  // min_scale.
  void update(bool found_inf_anywhere);

  GradScalerState state() const { return state_; }
  // UsageError for a scale that is not positive and finite and for negative counts.
  void load(const GradScalerState& state);

 private:
  GradScalerOptions options_;
  GradScalerState state_;
};

// How a model uses 16-bit arithmetic. After Micikevicius et al., "Mixed Precision Training" (ICLR 2018).

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
