#pragma once
// LAMB: Adam whose step is rescaled per parameter to the parameter's own norm. You et al., "Large Batch Optimization
// for Deep Learning: Training BERT in 76 minutes" (ICLR 2020).

#include <tuple>

#include "shoal/optim/optimizer_base.h"

namespace shoal {

struct LambOptions : public torch::optim::OptimizerCloneableOptions<LambOptions> {
  LambOptions(double lr = 1e-3) : lr_(lr) {}  // NOLINT: converts like libtorch's
  TORCH_ARG(double, lr) = 1e-3;
  typedef std::tuple<double, double> betas_t;
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);
  TORCH_ARG(double, eps) = 1e-6;
  TORCH_ARG(double, weight_decay) = 0.01;
  TORCH_ARG(bool, bias_correction) = true;
  // false: parameters without weight decay take Adam's step, as apex does by default (use_nvlamb = false).
  TORCH_ARG(bool, always_adapt) = true;

 public:
  // Throws UsageError that lists all faults.
  void validate() const;
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override { return lr(); }
  void set_lr(double lr) override { lr_ = lr; }
};

struct LambParamState : public torch::optim::OptimizerCloneableParamState<LambParamState> {
  TORCH_ARG(int64_t, step) = 0;
  TORCH_ARG(at::Tensor, exp_avg);  // the parameter's shape and dtype, as exp_avg_sq
  TORCH_ARG(at::Tensor, exp_avg_sq);

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

// With Adam's moments m and v, corrected for their start at zero:
//
//   u = m / (sqrt(v) + eps) + weight_decay * p
//   p -= lr * |p| / |u| * u       (the ratio of 2-norms is 1 where one of them is 0)
//
// The ratio needs whole parameters: on shards each rank must own whole tensors. Gradients are not clipped to a global
// norm as apex's version does on top; clip before. Gradients must be dense, parameters floating point; UsageError
// otherwise, before anything has changed.
class Lamb : public OptimizerBase<LambOptions, LambParamState> {
 public:
  using OptimizerBase::OptimizerBase;
  at::Tensor step(LossClosure closure = nullptr) override;
};

}  // namespace shoal
