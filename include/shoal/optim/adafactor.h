#pragma once
// Adafactor: of a matrix' second moment only the means of its rows and columns are kept. Shazeer and Stern, "Adafactor:
// Adaptive Learning Rates with Sublinear Memory Cost" (ICML 2018).

#include <optional>

#include "shoal/optim/optimizer_base.h"

namespace shoal {

struct AdafactorOptions : public torch::optim::OptimizerCloneableOptions<AdafactorOptions> {
  AdafactorOptions(double lr = 1e-2) : lr_(lr) {}  // NOLINT: converts like libtorch's
  // Upper bound of the relative step min(lr, 1 / sqrt(step)), and factor of the weight decay.
  TORCH_ARG(double, lr) = 1e-2;
  TORCH_ARG(double, beta2_decay) = -0.8;  // the second moment forgets with beta2 = 1 - step ^ beta2_decay
  // Lower bound of the root of the second moment; nullopt: the machine epsilon of the parameter's dtype.
  TORCH_ARG(std::optional<double>, eps1) = std::nullopt;
  TORCH_ARG(double, eps2) = 1e-3;  // lower bound of the parameter's root mean square, to which steps are relative
  TORCH_ARG(double, d) = 1.0;      // a step's root mean square, before scaling, is clipped to this
  TORCH_ARG(double, weight_decay) = 0;
  TORCH_ARG(double, beta1) = 0;  // above 0: steps are averaged (the paper's first moment; one more tensor of state)

 public:
  // Throws UsageError that lists all faults.
  void validate() const;
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override { return lr(); }
  void set_lr(double lr) override { lr_ = lr; }
};

struct AdafactorParamState : public torch::optim::OptimizerCloneableParamState<AdafactorParamState> {
  TORCH_ARG(int64_t, step) = 0;
  // Of parameters with two and more dimensions, over the last two: [..., n, m] has rows [..., n, 1] and columns
  // [..., 1, m]. Others have `variance` of their own shape.
  TORCH_ARG(at::Tensor, row_var);
  TORCH_ARG(at::Tensor, col_var);
  TORCH_ARG(at::Tensor, variance);
  TORCH_ARG(at::Tensor, exp_avg);  // with beta1 only

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

// The step of torch.optim.Adafactor (PyTorch 2.13), which has no beta1; with beta1, the step that is averaged is the
// clipped and scaled one. On shards each rank must own whole tensors. Gradients must be dense, parameters floating
// point; UsageError otherwise, before anything has changed.
class Adafactor : public OptimizerBase<AdafactorOptions, AdafactorParamState> {
 public:
  using OptimizerBase::OptimizerBase;
  at::Tensor step(LossClosure closure = nullptr) override;
};

}  // namespace shoal
