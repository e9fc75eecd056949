#pragma once
// Optimizers, and which of them may update pieces of a parameter.

#include <memory>
#include <optional>
#include <torch/nn/module.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <tuple>
#include <utility>
#include <vector>

#include "shoal/detail/optimizer_base.h"

namespace shoal {

// Stochastic gradient descent, with or without (Nesterov) momentum, in one pass over memory.

// torch::optim::SGD with libtorch's fused kernel; otherwise as FusedAdamW. 16-bit parameters on the CPU are updated by
// separate operators instead: libtorch 2.13's kernel leaves most of their elements as they are.
class FusedSGD : public torch::optim::SGD {
 public:
  using torch::optim::SGD::SGD;
  at::Tensor step(LossClosure closure = nullptr) override;
};

// Adam (Kingma and Ba, 2015) in one pass over memory.

// torch::optim::Adam with libtorch's fused kernel; otherwise as FusedAdamW.
class FusedAdam : public torch::optim::Adam {
 public:
  using torch::optim::Adam::Adam;
  at::Tensor step(LossClosure closure = nullptr) override;
};

// AdamW (Loshchilov and Hutter, 2019) in one pass over memory.

// torch::optim::AdamW with libtorch's fused kernel: the same options, the same state (so that it can be saved and
// loaded as the other one's), the same result up to rounding, a fraction of the time: the moments, the parameter and
// the gradient are read and written once instead of once per operator. Parameters and gradients must be dense, floating
// point and on one device per parameter group; UsageError otherwise, before anything has changed.
class FusedAdamW : public torch::optim::AdamW {
 public:
  using torch::optim::AdamW::AdamW;
  at::Tensor step(LossClosure closure = nullptr) override;
};

// Adagrad (Duchi, Hazan and Singer, 2011) in one pass over memory.

// torch::optim::Adagrad with libtorch's fused kernel; otherwise as FusedAdamW. Parameters that come with
// add_param_group train too (with the base class they have no state and its step fails).
class FusedAdagrad : public torch::optim::Adagrad {
 public:
  using torch::optim::Adagrad::Adagrad;
  at::Tensor step(LossClosure closure = nullptr) override;
};

// Adam for large effective batches: moments of the means of several steps' gradients. From DecentDP, Wang et al.,
// "From Promise to Practice: Realizing High-performance Decentralized Training" (ICLR 2025).

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

// LAMB: Adam whose step is rescaled per parameter to the parameter's own norm. You et al., "Large Batch Optimization
// for Deep Learning: Training BERT in 76 minutes" (ICLR 2020).

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

// Adafactor: of a matrix' second moment only the means of its rows and columns are kept. Shazeer and Stern, "Adafactor:
// Adaptive Learning Rates with Sublinear Memory Cost" (ICML 2018).

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

// Muon: momentum whose matrices are made orthogonal before they are applied. Jordan et al., "Muon: An optimizer for
// hidden layers in neural networks" (2024); the second rate is from Liu et al., "Muon is Scalable for LLM Training"
// (2025).

// How the rate depends on the shape [n, m] of a parameter.
enum class MuonRate {
  original,         // lr * sqrt(max(1, n / m))
  match_rms_adamw,  // 0.2 * lr * sqrt(max(n, m)): AdamW's lr and weight_decay may be kept
};

struct MuonOptions : public torch::optim::OptimizerCloneableOptions<MuonOptions> {
  MuonOptions(double lr = 1e-3) : lr_(lr) {}  // NOLINT: converts like libtorch's
  TORCH_ARG(double, lr) = 1e-3;
  TORCH_ARG(double, weight_decay) = 0.1;
  TORCH_ARG(double, momentum) = 0.95;
  TORCH_ARG(bool, nesterov) = true;
  // Of the Newton-Schulz iteration x <- a x + (b x xT + c (x xT)^2) x.
  typedef std::tuple<double, double, double> ns_coefficients_t;
  TORCH_ARG(ns_coefficients_t, ns_coefficients) = std::make_tuple(3.4445, -4.7750, 2.0315);
  TORCH_ARG(double, eps) = 1e-7;  // lower bound of the norm that the iteration starts by dividing by
  TORCH_ARG(int64_t, ns_steps) = 5;
  TORCH_ARG(MuonRate, adjust_lr) = MuonRate::original;

 public:
  // Throws UsageError that lists all faults.
  void validate() const;
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override { return lr(); }
  void set_lr(double lr) override { lr_ = lr; }
};

struct MuonParamState : public torch::optim::OptimizerCloneableParamState<MuonParamState> {
  TORCH_ARG(at::Tensor, momentum_buffer);  // the parameter's shape and dtype

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

// The step of torch.optim.Muon (PyTorch 2.13); the iteration runs in bfloat16. For the matrices of hidden layers only:
// give biases, norms and embeddings to an optimizer like AdamW. UsageError, which names index and shape, for parameters
// that do not have two dimensions; on shards each rank must own whole tensors. Gradients must be dense, parameters
// floating point; UsageError otherwise, before anything has changed.
class Muon : public OptimizerBase<MuonOptions, MuonParamState> {
 public:
  explicit Muon(const ParamGroups& groups, MuonOptions defaults = {});
  explicit Muon(std::vector<at::Tensor> parameters, MuonOptions defaults = {});
  void add_param_group(const torch::optim::OptimizerParamGroup& group);
  at::Tensor step(LossClosure closure = nullptr) override;
};

// Which optimizers may be given pieces of a parameter.

// True when every element's update depends on this element's own gradient and state only, so that updating the pieces
// of a parameter on different ranks equals updating the whole. A strategy that cuts parameters asks for it; for other
// optimizers (LAMB's norms, Adafactor's rows and columns, Muon's products) a rank must own whole parameters.
//
// False unless stated, also for classes derived from these. For an element-wise optimizer of your own:
//
//   template <>
//   inline constexpr bool shoal::element_wise<MyOptimizer> = true;
template <class Optimizer>
inline constexpr bool element_wise = false;

template <>
inline constexpr bool element_wise<torch::optim::SGD> = true;
template <>
inline constexpr bool element_wise<torch::optim::Adam> = true;
template <>
inline constexpr bool element_wise<torch::optim::AdamW> = true;
template <>
inline constexpr bool element_wise<torch::optim::RMSprop> = true;
template <>
inline constexpr bool element_wise<torch::optim::Adagrad> = true;
template <>
inline constexpr bool element_wise<FusedSGD> = true;
template <>
inline constexpr bool element_wise<FusedAdam> = true;
template <>
inline constexpr bool element_wise<FusedAdamW> = true;
template <>
inline constexpr bool element_wise<FusedAdagrad> = true;
template <>
inline constexpr bool element_wise<AccumAdam> = true;
template <>
inline constexpr bool element_wise<AccumAdamW> = true;

// Param groups that leave biases and norms without weight decay.

struct DecaySplit {
  std::vector<at::Tensor> decayed, spared;
};

// Each of the module's parameters once, a tied one by its first name. Spared: vectors and scalars (biases, and the
// weights of nearly all norms), whatever has "bias" in its own name, and torch::nn::LayerNorm's weights of any shape.
// What else is to be spared, such as embeddings, moves by hand. Not collective.
DecaySplit split_by_decay(const torch::nn::Module& module);

template <class Options>
struct DecayGroups {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  Options defaults;
};

// For an optimizer with these options: a group of what decays, then one of the rest, whose weight_decay is 0.
// `Options`: libtorch's, shoal's, or any that is made from a rate and has weight_decay.
//
//   const auto [groups, defaults] =
//       shoal::decay_groups(*model, torch::optim::AdamWOptions(1e-3).weight_decay(0.1));
//   shoal::FusedAdamW optimizer(groups, defaults);
//
// Give the optimizer these defaults and no others: libtorch 2.13 takes a group's value that equals its type's own
// default for one that was not set, and puts the optimizer's in its place. So the defaults' weight_decay is the type's.
template <class Options>
DecayGroups<Options> decay_groups(const torch::nn::Module& module, const Options& options) {
  auto split = split_by_decay(module);
  auto spared = options, defaults = options;
  spared.weight_decay(0);
  defaults.weight_decay(Options(options.lr()).weight_decay());
  DecayGroups<Options> made{{}, defaults};
  made.groups.emplace_back(std::move(split.decayed), std::make_unique<Options>(options));
  made.groups.emplace_back(std::move(split.spared), std::make_unique<Options>(spared));
  return made;
}

}  // namespace shoal
