#pragma once
// OptimizerInBackward: optimizer updates within backward, for DistributedDataParallel. Each bucket's parameters are
// updated as soon as their gradients are averaged, and the gradients are freed. Source: Lv et al., "Full Parameter
// Fine-tuning for Large Language Models with Limited Resources" (LOMO, ACL 2024), and PyTorch's overlapped optimizers.

#include <torch/optim/optimizer.h>

#include <memory>
#include <optional>

#include "shoal/ddp.h"
#include "shoal/precision.h"

namespace shoal {

// Treatment of quantities that depend on all gradients of a step (their norm, and the check for inf and NaN), while
// updates run before all gradients exist.
enum class WholeGradient {
  exact,       // updates wait for the last gradient if clip_grad or scaler is set, so that no memory is saved
  stale,       // clip by the norm of the previous step; the first step is as with exact
  per_bucket,  // clip each bucket by its own norm
};

struct OptimizerInBackwardOptions {
  double clip_grad = 0;  // maximum norm of the gradients; 0: no clipping
  WholeGradient whole_gradient = WholeGradient::exact;
  // Loss scaler. If a gradient is inf or NaN, exact skips the whole update; stale and per_bucket skip its bucket.
  std::optional<GradScalerOptions> scaler{};

  // Throws UsageError with a list of all invalid options.
  void validate() const;
};

// Updates parameters during backward; there is no step() or zero_grad() to call.
//
//   shoal::DistributedDataParallel parallel(model, world.group());
//   torch::optim::AdamW optimizer(model->parameters(), 1e-3);
//   shoal::OptimizerInBackward in_backward(parallel, optimizer);
//   for (...) cross_entropy(parallel.forward(x), y).backward();
//
// A gradient exists from its computation until its bucket is updated: at most two buckets at a time, plus the gradients
// that backward holds; over Gloo briefly a third bucket. (If all buckets together have at most 8 MiB, their memory is
// kept, because allocating it would cost more than the step.) Micro-batches under no_sync accumulate in buckets that
// remain until the last one. With a communication hook, or with 16-bit gradients, the averages are known only at the
// end of backward: updates then run there, bucket by bucket, and no memory is saved. Results are bit-equal to
// optimizer.step() after backward for optimizers that treat each parameter by itself, which excludes L-BFGS.
//
// After backward, grad() is a tensor without memory, until the next backward. It can be zeroed and dropped. Reading it
// (torch::nn::utils::clip_grad_norm_, the optimizer's step()) is a UsageError that names clip_grad. The next backward
// throws UsageError if gradients of only some updated parameters were zeroed or dropped; a zero_grad() of all after
// that hides it.
//
// The caller owns the optimizer, which must outlive this object and hold exactly the module's trainable parameters; its
// step() is called once per bucket. Schedules, options and state remain the caller's.
//
// If backward fails on one rank, the others get StepAbandoned. With exact and a clip_grad or scaler nothing has been
// updated then; otherwise buckets reduced before the failure are updated, the same ones on all ranks. Gradients are
// dropped. Backward must not use a weight after its gradient was computed (libtorch reports a modification in place),
// so a graph can run backward only once.
//
// Constructor: collective, before the first step. Throws UsageError for invalid options and parameters, DisagreeError
// if the ranks have different options. After this object is destroyed, backward is a UsageError. The wrapper may be
// destroyed first.
class OptimizerInBackward {
 public:
  OptimizerInBackward(DistributedDataParallelCore& parallel, torch::optim::Optimizer& optimizer,
                      const OptimizerInBackwardOptions& options = {});
  ~OptimizerInBackward();
  OptimizerInBackward(const OptimizerInBackward&) = delete;
  OptimizerInBackward& operator=(const OptimizerInBackward&) = delete;

  // Multiplies a loss by the scaler's factor; without a scaler returns it unchanged.
  at::Tensor scale_loss(const at::Tensor& loss) const;
  const GradScaler* scaler() const;
  GradScaler* scaler();  // for TrainingState
  // Norm of the gradients of the last step before clipping, with clip_grad. Not available with per_bucket.
  double last_norm() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace shoal
