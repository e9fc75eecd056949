#pragma once
// OptimizerInBackward: under DistributedDataParallel each bucket's parameters are updated inside backward, as soon as
// their gradients' means are there, and the gradients go. After Lv et al., "Full Parameter Fine-tuning for Large
// Language Models with Limited Resources" (LOMO, ACL 2024), and PyTorch's overlapped optimizers.

#include <torch/optim/optimizer.h>

#include <memory>
#include <optional>

#include "shoal/ddp.h"
#include "shoal/precision.h"

namespace shoal {

// What depends on all gradients of a step, while updates run before all are there: their norm, and whether any is inf
// or NaN.
enum class WholeGradient {
  exact,       // updates wait for the last gradient if there is anything to ask: with clip_grad or scaler, no memory is
               // saved
  stale,       // clipped as the last step's norm says; in the first step as exact
  per_bucket,  // each bucket is clipped by its own norm
};

struct OptimizerInBackwardOptions {
  double clip_grad = 0;  // largest norm of the gradients; 0: no clipping
  WholeGradient whole_gradient = WholeGradient::exact;
  // Of the loss. Where a gradient is inf or NaN, exact: nothing is updated; stale, per_bucket: its bucket is not.
  std::optional<GradScalerOptions> scaler{};

  // Throws UsageError that lists all faults.
  void validate() const;
};

//   shoal::DistributedDataParallel parallel(model, world.group());
//   torch::optim::AdamW optimizer(model->parameters(), 1e-3);
//   shoal::OptimizerInBackward in_backward(parallel, optimizer);
//   for (...) cross_entropy(parallel.forward(x), y).backward();  // updates; there is nothing to step or to zero
//
// Gradients exist from their arrival until their bucket is updated: at most two buckets at a time, and the gradients
// that backward has at hand; over Gloo for a moment a third bucket. (Buckets of up to 8 MiB together keep their memory,
// as getting it would cost more than the step.) Micro-batches under no_sync accumulate in buckets that stay until the
// last one. With a communication hook, and where all or some gradients have 16 bits, means are known when backward has
// ended: then updates run there, bucket by bucket, and nothing is saved. Results equal those of optimizer.step() after
// backward to the last bit, for optimizers that treat each parameter by itself, which leaves out L-BFGS.
//
// After backward grad() is a tensor without memory, until the next one. It can be zeroed and dropped; what reads it
// (torch::nn::utils::clip_grad_norm_, the optimizer's step()) is a UsageError that names clip_grad. So is the next
// backward where the gradients of some of the updated parameters only have been zeroed or dropped.
//
// The optimizer is the caller's, and must outlive this object; its step() is called once for each bucket. Schedules,
// options and state are the caller's as ever. It has the module's trainable parameters, and no others.
//
// In a backward that fails on one rank, the others get StepAbandoned: with exact and a norm or a scaler nothing has
// been updated; otherwise buckets that had left before are updated, the same ones on all ranks. Gradients are dropped.
// A weight may not be used by backward after its gradient has come: libtorch says that it was modified in place. So a
// graph runs backward once.
//
// Constructor: collective, before the first step. UsageError for wrong options and parameters; DisagreeError when ranks
// have different options. Without this object backward is a UsageError; the wrapper may go before it.
class OptimizerInBackward {
 public:
  OptimizerInBackward(DistributedDataParallelCore& parallel, torch::optim::Optimizer& optimizer,
                      const OptimizerInBackwardOptions& options = {});
  ~OptimizerInBackward();
  OptimizerInBackward(const OptimizerInBackward&) = delete;
  OptimizerInBackward& operator=(const OptimizerInBackward&) = delete;

  // Scales a loss as the scaler says; without scaler the loss itself.
  at::Tensor scale_loss(const at::Tensor& loss) const;
  const GradScaler* scaler() const;
  GradScaler* scaler();  // for TrainingState
  // Of the last step's gradients, with clip_grad; before clipping. Not per_bucket.
  double last_norm() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace shoal
