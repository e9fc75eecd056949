#pragma once
// Mixed precision: dtypes and the gradient scaler, after Micikevicius et al., "Mixed Precision Training" (ICLR 2018).

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/types.h>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

namespace shoal {

struct GradScalerOptions {
  double initial_scale = 4294967296.0;  // 2^32 as in Megatron-LM; torch.amp starts at 65536
  bool dynamic = true;                  // false: the scale is constant

  // Settings of the dynamic scale. torch.amp has a growth interval of 2000 and a hysteresis of 1.
  double growth_factor = 2;
  double backoff_factor = 0.5;
  int64_t growth_interval = 1000;  // consecutive steps without inf or NaN before the scale grows
  int64_t hysteresis = 2;  // steps with inf or NaN before the scale shrinks; the count restarts only when the scale
                           // grows
  double min_scale = 1;

  // Throws UsageError with a list of all invalid options.
  void validate() const;
};

// State of a scaler, as saved in checkpoints.
struct GradScalerState {
  double scale = 0;
  int64_t good_steps = 0;       // consecutive steps without inf or NaN
  int64_t hysteresis_left = 0;  // remaining steps with inf or NaN before the scale shrinks
};

// Loss scaler that keeps 16-bit gradients from underflow. The dynamic scale with hysteresis is that of Megatron-LM's
// DynamicGradScaler. The strategies use it for their optimizers; on its own:
//
//   scaler.scale(loss).backward();
//   const bool found = any_rank(scaler.unscale(gradients));
//   if (!found) optimizer.step();
//   scaler.update(found);
//
// Not collective: the caller must make sure that all ranks agree on `found`. With the same calls of update(), the
// scales of all ranks stay equal. Not thread-safe.
class GradScaler {
 public:
  explicit GradScaler(const GradScalerOptions& options = {});

  double value() const { return state_.scale; }
  // Loss times the scale; part of the autograd graph.
  at::Tensor scale(const at::Tensor& loss) const;
  // Divides the gradients by the scale in place; returns true if an element was inf or NaN on this rank. Undefined
  // gradients are skipped; pass gradients that share memory only once. The factor is rounded to float32, which is exact
  // for powers of two, as with the default factors. Throws UsageError for integer tensors.
  bool unscale(const std::vector<at::Tensor>& gradients) const;
  // Whether unscale() has divided one of them since the last update(). OSS::step(scaler) refuses these.
  bool unscaled(const std::vector<at::Tensor>& gradients) const;
  // Updates the scale. Call it after each step, with a value that is equal on all ranks. A dynamic scale stays within
  // the range of float32 and above min_scale.
  void update(bool found_inf_anywhere);

  const GradScalerOptions& options() const { return options_; }
  GradScalerState state() const { return state_; }
  // Restores the state. Throws UsageError for a scale that is not positive and finite and for negative counts.
  void load(const GradScalerState& state);

 private:
  GradScalerOptions options_;
  GradScalerState state_;
  struct Unscaled {
    c10::weak_intrusive_ptr<c10::StorageImpl> memory;
    uint32_t version;  // of the tensor: a later one has other values
  };
  // Where the gradients lie that unscale() has divided since the last update().
  mutable std::map<const void*, Unscaled> unscaled_;
};

// Dtypes of a training.

struct Precision {
  at::ScalarType parameters = at::kFloat;     // dtype of the module's parameters
  std::optional<at::ScalarType> compute{};    // dtype of autocast in forward; none: no autocast
  std::optional<GradScalerOptions> scaler{};  // loss scaler, for gradients with the range of float16

  static Precision float32() { return {}; }
  static Precision float64() { return {.parameters = at::kDouble}; }
  // bfloat16 autocast; parameters, gradients and their sums are float32.
  static Precision bf16_mixed() { return {.compute = at::kBFloat16}; }
  static Precision fp16_mixed() { return {.compute = at::kHalf, .scaler = GradScalerOptions{.initial_scale = 65536}}; }
  // 16-bit parameters, for strategies that keep float32 main copies (Megatron, FSDP, shard gossip). Under others small
  // updates are lost without an error: take bf16_mixed(), which is what other libraries call bf16.
  static Precision bf16() { return {.parameters = at::kBFloat16}; }
  static Precision fp16() { return {.parameters = at::kHalf, .scaler = GradScalerOptions{.initial_scale = 65536}}; }

  // Converts the module's floating-point parameters and buffers to the dtype `parameters`.
  void convert(torch::nn::Module& module) const { module.to(parameters); }
  // Converts a floating-point input to the dtype `parameters`; other tensors are returned unchanged.
  at::Tensor input(const at::Tensor& tensor) const {
    return tensor.is_floating_point() ? tensor.to(parameters) : tensor;
  }

  // Autocast scope: operators on `device` run in the dtype `compute`; without compute it has no effect. Scopes nest.
  // Run backward outside of it: backward uses the dtypes of forward.
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
