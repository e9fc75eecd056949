#pragma once
// Adam for large effective batches: moments of the means of several steps' gradients. From DecentDP, Wang et al.,
// "From Promise to Practice: Realizing High-performance Decentralized Training" (ICLR 2025).

#include <tuple>

#include "shoal/optim/optimizer_base.h"

namespace shoal {

struct AccumAdamOptions : public torch::optim::OptimizerCloneableOptions<AccumAdamOptions> {
  AccumAdamOptions(double lr = 1e-3) : lr_(lr) {}  // NOLINT: converts like libtorch's
  TORCH_ARG(double, lr) = 1e-3;
  typedef std::tuple<double, double> betas_t;
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);
  TORCH_ARG(double, eps) = 1e-8;
  TORCH_ARG(double, weight_decay) = 0;
  TORCH_ARG(int64_t, accum_iter) = 4;  // steps per update of the moments; more with more ranks

 public:
  // Throws UsageError that lists all faults.
  void validate() const;
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override { return lr(); }
  void set_lr(double lr) override { lr_ = lr; }
};

struct AccumAdamParamState : public torch::optim::OptimizerCloneableParamState<AccumAdamParamState> {
  TORCH_ARG(int64_t, step) = 0;    // steps in which the parameter had a gradient
  TORCH_ARG(at::Tensor, exp_avg);  // the parameter's shape and dtype, as the two below
  TORCH_ARG(at::Tensor, exp_avg_sq);
  TORCH_ARG(at::Tensor, accum_grad);  // the part that is known of the mean which the moments take in next

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

// With m and v, Adam's moments of the means of accum_iter gradients g each, every step takes a preview:
//
//   m' = beta1 * m + (1 - beta1) * g        v' = beta2 * v + (1 - beta2) * g^2
//   p -= lr * (m' / (1 - beta1^t)) / (sqrt(v' / (1 - beta2^t)) + eps)       t = ceil(step / accum_iter)
//
// and every accum_iter-th one updates m and v with the mean. So each step answers to its own gradient, while the
// moments have the noise of a batch that is accum_iter times as large. With accum_iter 1 it is Adam, whose state's
// fields it has. Weight decay is added to the gradient; the gradient itself stays as it is.
//
// Element-wise: may be given pieces of a parameter. Gradients must be dense, parameters floating point; UsageError
// otherwise, before anything has changed.
class AccumAdam : public OptimizerBase<AccumAdamOptions, AccumAdamParamState> {
 public:
  using OptimizerBase::OptimizerBase;
  at::Tensor step(LossClosure closure = nullptr) override;

 protected:
  at::Tensor step_with(const LossClosure& closure, bool decoupled_decay);
};

// The same, but weight decay takes lr * weight_decay of itself from the parameter before the step, as AdamW's.
class AccumAdamW : public AccumAdam {
 public:
  using AccumAdam::AccumAdam;
  at::Tensor step(LossClosure closure = nullptr) override;
};

}  // namespace shoal
