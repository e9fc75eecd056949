#pragma once
// Optimizers, the trait element_wise, and param groups without weight decay.

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "shoal/detail/module_ref.h"
#include "shoal/detail/optimizer_base.h"
#include "shoal/optimizer_state.h"

namespace shoal {

// Fused SGD with (Nesterov) momentum: torch::optim::SGD with libtorch's fused kernel; otherwise as FusedAdamW. 16-bit
// parameters on the CPU are updated by separate operators: libtorch 2.13's kernel leaves most of their elements
// unchanged.
class FusedSGD : public torch::optim::SGD {
 public:
  using torch::optim::SGD::SGD;
  at::Tensor step(LossClosure closure = nullptr) override;
};

// Fused Adam (Kingma and Ba, 2015): torch::optim::Adam with libtorch's fused kernel; otherwise as FusedAdamW.
class FusedAdam : public torch::optim::Adam {
 public:
  using torch::optim::Adam::Adam;
  at::Tensor step(LossClosure closure = nullptr) override;
};

// Fused AdamW (Loshchilov and Hutter, 2019): torch::optim::AdamW with libtorch's fused kernel. Options and state are
// those of torch::optim::AdamW, so checkpoints are interchangeable; results are equal up to rounding. It is faster
// because it reads and writes moments, parameter and gradient once instead of once per operator. Parameters and
// gradients must be dense, floating point, and on one device per param group; otherwise step() throws UsageError and
// changes nothing.
class FusedAdamW : public torch::optim::AdamW {
 public:
  using torch::optim::AdamW::AdamW;
  at::Tensor step(LossClosure closure = nullptr) override;
};

// Fused Adagrad (Duchi, Hazan and Singer, 2011): torch::optim::Adagrad with libtorch's fused kernel; otherwise as
// FusedAdamW. Parameters added with add_param_group are trained too (the base class has no state for them, and its step
// fails).
class FusedAdagrad : public torch::optim::Adagrad {
 public:
  using torch::optim::Adagrad::Adagrad;
  at::Tensor step(LossClosure closure = nullptr) override;
};

struct AccumAdamOptions : public torch::optim::OptimizerCloneableOptions<AccumAdamOptions> {
  AccumAdamOptions(double lr = 1e-3) : lr_(lr) {}  // NOLINT: converts like libtorch's
  TORCH_ARG(double, lr) = 1e-3;
  typedef std::tuple<double, double> betas_t;
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);
  TORCH_ARG(double, eps) = 1e-8;
  TORCH_ARG(double, weight_decay) = 0;
  TORCH_ARG(int64_t, accum_iter) = 4;  // steps per update of the moments; use more with more ranks

 public:
  // Throws UsageError with a list of all invalid options.
  void validate() const;
  bool operator==(const AccumAdamOptions& other) const;
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override { return lr(); }
  void set_lr(double lr) override { lr_ = lr; }
};

struct AccumAdamParamState : public torch::optim::OptimizerCloneableParamState<AccumAdamParamState> {
  TORCH_ARG(int64_t, step) = 0;    // steps in which the parameter had a gradient
  TORCH_ARG(at::Tensor, exp_avg);  // shape and dtype of the parameter, like the next two
  TORCH_ARG(at::Tensor, exp_avg_sq);
  TORCH_ARG(at::Tensor, accum_grad);  // accumulated part of the mean gradient for the next update of the moments

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

// Adam with moments of the mean over accum_iter steps' gradients, for large effective batches. Source: DecentDP (Wang
// et al., "From Promise to Practice: Realizing High-performance Decentralized Training", ICLR 2025). Let m and v be
// Adam's moments of these means. Every step with gradient g uses preliminary moments
//
//   m' = beta1 * m + (1 - beta1) * g        v' = beta2 * v + (1 - beta2) * g^2
//   p -= lr * (m' / (1 - beta1^t)) / (sqrt(v' / (1 - beta2^t)) + eps)       t = ceil(step / accum_iter)
//
// and every accum_iter-th step updates m and v with the mean. Each step thus reacts to its own gradient, while the
// moments have the noise of a batch that is accum_iter times as large. With accum_iter 1 it equals Adam. It loads
// Adam's state; its own has accum_grad besides. Weight decay is added to a copy of the gradient.
//
// Element-wise: supports shards of parameters. Gradients must be dense and parameters floating point; otherwise step()
// throws UsageError and changes nothing.
class AccumAdam : public detail::OptimizerBase<AccumAdamOptions, AccumAdamParamState> {
 public:
  using OptimizerBase::OptimizerBase;
  at::Tensor step(LossClosure closure = nullptr) override;

 protected:
  at::Tensor step_with(const LossClosure& closure, bool decoupled_decay);
};

// AccumAdam with decoupled weight decay, as in AdamW: subtracts lr * weight_decay * p before the step.
class AccumAdamW : public AccumAdam {
 public:
  using AccumAdam::AccumAdam;
  at::Tensor step(LossClosure closure = nullptr) override;
};

struct LambOptions : public torch::optim::OptimizerCloneableOptions<LambOptions> {
  LambOptions(double lr = 1e-3) : lr_(lr) {}  // NOLINT: converts like libtorch's
  TORCH_ARG(double, lr) = 1e-3;
  typedef std::tuple<double, double> betas_t;
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);
  TORCH_ARG(double, eps) = 1e-6;
  TORCH_ARG(double, weight_decay) = 0.01;
  TORCH_ARG(bool, bias_correction) = true;
  // false: parameters without weight decay take Adam's step, the default of apex (use_nvlamb = false).
  TORCH_ARG(bool, always_adapt) = true;

 public:
  // Throws UsageError with a list of all invalid options.
  void validate() const;
  bool operator==(const LambOptions& other) const;
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override { return lr(); }
  void set_lr(double lr) override { lr_ = lr; }
};

struct LambParamState : public torch::optim::OptimizerCloneableParamState<LambParamState> {
  TORCH_ARG(int64_t, step) = 0;
  TORCH_ARG(at::Tensor, exp_avg);  // shape and dtype of the parameter, like exp_avg_sq
  TORCH_ARG(at::Tensor, exp_avg_sq);

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

// LAMB: Adam with steps rescaled per parameter to the parameter's norm. Source: You et al., "Large Batch Optimization
// for Deep Learning: Training BERT in 76 minutes" (ICLR 2020). With Adam's bias-corrected moments m and v:
//
//   u = m / (sqrt(v) + eps) + weight_decay * p
//   p -= lr * |p| / |u| * u       (the ratio of 2-norms is 1 if one of them is 0)
//
// The ratio needs full parameters: with a sharded strategy, each rank must own whole parameters. Gradients are not
// clipped to a global norm, unlike in apex; clip before. Gradients must be dense and parameters floating point;
// otherwise step() throws UsageError and changes nothing.
class Lamb : public detail::OptimizerBase<LambOptions, LambParamState> {
 public:
  using OptimizerBase::OptimizerBase;
  at::Tensor step(LossClosure closure = nullptr) override;
};

struct AdafactorOptions : public torch::optim::OptimizerCloneableOptions<AdafactorOptions> {
  AdafactorOptions(double lr = 1e-2) : lr_(lr) {}  // NOLINT: converts like libtorch's
  // Upper bound of the relative step min(lr, 1 / sqrt(step)), and factor of the weight decay.
  TORCH_ARG(double, lr) = 1e-2;
  TORCH_ARG(double, beta2_decay) = -0.8;  // decay of the second moment: beta2 = 1 - step ^ beta2_decay
  // Lower bound of the square root of the second moment; nullopt: the machine epsilon of the parameter's dtype.
  TORCH_ARG(std::optional<double>, eps1) = std::nullopt;
  TORCH_ARG(double, eps2) = 1e-3;  // lower bound of the parameter's root mean square, which scales the step
  TORCH_ARG(double, d) = 1.0;      // upper bound of the root mean square of the unscaled step
  TORCH_ARG(double, weight_decay) = 0;
  TORCH_ARG(double, beta1) = 0;  // above 0: steps are averaged (the paper's first moment), which needs one more tensor
                                 // of state

 public:
  // Throws UsageError with a list of all invalid options.
  void validate() const;
  bool operator==(const AdafactorOptions& other) const;
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override { return lr(); }
  void set_lr(double lr) override { lr_ = lr; }
};

struct AdafactorParamState : public torch::optim::OptimizerCloneableParamState<AdafactorParamState> {
  TORCH_ARG(int64_t, step) = 0;
  // For parameters with at least two dimensions, [..., n, m]: means over the last two, row_var [..., n, 1] and col_var
  // [..., 1, m]. Other parameters have `variance` of their own shape.
  TORCH_ARG(at::Tensor, row_var);
  TORCH_ARG(at::Tensor, col_var);
  TORCH_ARG(at::Tensor, variance);
  TORCH_ARG(at::Tensor, exp_avg);  // with beta1 only

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

// Adafactor: keeps only row and column means of a matrix's second moment. Source: Shazeer and Stern, "Adafactor:
// Adaptive Learning Rates with Sublinear Memory Cost" (ICML 2018). The step is that of torch.optim.Adafactor (PyTorch
// 2.13), which has no beta1; beta1 averages the clipped and scaled steps. With a sharded strategy, each rank must own
// whole parameters. Gradients must be dense and parameters floating point; otherwise step() throws UsageError and
// changes nothing.
class Adafactor : public detail::OptimizerBase<AdafactorOptions, AdafactorParamState> {
 public:
  using OptimizerBase::OptimizerBase;
  at::Tensor step(LossClosure closure = nullptr) override;
};

// Dependence of the learning rate on the shape [n, m] of a parameter.
enum class MuonRate {
  original,         // lr * sqrt(max(1, n / m))
  match_rms_adamw,  // 0.2 * lr * sqrt(max(n, m)): allows AdamW's lr and weight_decay
};

struct MuonOptions : public torch::optim::OptimizerCloneableOptions<MuonOptions> {
  MuonOptions(double lr = 1e-3) : lr_(lr) {}  // NOLINT: converts like libtorch's
  TORCH_ARG(double, lr) = 1e-3;
  TORCH_ARG(double, weight_decay) = 0.1;
  TORCH_ARG(double, momentum) = 0.95;
  TORCH_ARG(bool, nesterov) = true;
  // Coefficients of the Newton-Schulz iteration x <- a x + (b x xT + c (x xT)^2) x.
  typedef std::tuple<double, double, double> ns_coefficients_t;
  TORCH_ARG(ns_coefficients_t, ns_coefficients) = std::make_tuple(3.4445, -4.7750, 2.0315);
  TORCH_ARG(double, eps) = 1e-7;  // lower bound of the norm by which the iteration divides first
  TORCH_ARG(int64_t, ns_steps) = 5;
  TORCH_ARG(MuonRate, adjust_lr) = MuonRate::original;

 public:
  // Throws UsageError with a list of all invalid options.
  void validate() const;
  bool operator==(const MuonOptions& other) const;
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

// Muon: momentum with orthogonalised matrices. Source: Jordan et al., "Muon: An optimizer for hidden layers in neural
// networks" (2024); MuonRate::match_rms_adamw from Liu et al., "Muon is Scalable for LLM Training" (2025). The step is
// that of torch.optim.Muon (PyTorch 2.13); the iteration runs in bfloat16. For matrices of hidden layers only: use an
// optimizer like AdamW for biases, norms and embeddings. Throws UsageError, which names index and shape, for parameters
// that do not have two dimensions. With a sharded strategy, each rank must own whole parameters. Gradients must be
// dense and parameters floating point; otherwise step() throws UsageError and changes nothing.
class Muon : public detail::OptimizerBase<MuonOptions, MuonParamState> {
 public:
  explicit Muon(const ParamGroups& groups, MuonOptions defaults = {});
  explicit Muon(std::vector<at::Tensor> parameters, MuonOptions defaults = {});
  void add_param_group(const torch::optim::OptimizerParamGroup& group);
  at::Tensor step(LossClosure closure = nullptr) override;
};

struct MuonWithAdamWOptions {
  MuonOptions muon{};  // of param groups without options of their own
  // AdamW's other options; learning rate and weight decay are those of the param group.
  std::tuple<double, double> betas{0.9, 0.999};
  double eps = 1e-8;
};

// Muon for matrices and AdamW for all other parameters of a model, as one optimizer. FullyShardedOptimizer and
// DistributedOptimizer need one that has all parameters of their module.
//
//   shoal::FullyShardedDataParallel parallel(model, world.group(), {.shard_by_parameter = true});
//   const auto options = shoal::MuonOptions(1e-3).adjust_lr(shoal::MuonRate::match_rms_adamw);
//   shoal::FullyShardedOptimizer<shoal::MuonWithAdamW> optimizer(parallel, shoal::MuonWithAdamW::groups_of(*model),
//                                                                options);
//
// The first param group is Muon's: matrices only. The others are AdamW's (FusedAdamW), which takes lr and weight_decay
// of their MuonOptions, so that both can share a schedule; see MuonRate::match_rms_adamw. A parameter has the state of
// its optimizer's class. Not for torch::save, whose archive has one kind of state; use shoal::save.
class MuonWithAdamW : public detail::OptimizerBase<MuonOptions, MuonParamState> {
 public:
  explicit MuonWithAdamW(const ParamGroups& groups, MuonWithAdamWOptions defaults = {});
  MuonWithAdamW(const ParamGroups& groups, const MuonOptions& defaults);
  // Two groups of a module's parameters: weights of two dimensions except embeddings', and the rest.
  static ParamGroups groups_of(detail::ModuleRef module);
  // UsageError for a group of Muon's with other parameters than matrices.
  void add_param_group(const torch::optim::OptimizerParamGroup& group);
  at::Tensor step(LossClosure closure = nullptr) override;
  // Throw UsageError.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  void update(torch::optim::Optimizer& part);

  MuonWithAdamWOptions given_;
  Muon muon_;
  FusedAdamW adamw_;
};

// True if the update of an element depends only on the gradient and state of this element, so that updating shards of a
// parameter on different ranks equals updating the full parameter. Strategies that cut parameters require it; for other
// optimizers (LAMB's norms, Adafactor's rows and columns, Muon's products) each rank must own whole parameters.
//
// False by default, also for classes derived from these. For an element-wise optimizer of your own:
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

struct DecaySplit {
  std::vector<at::Tensor> decayed, spared;
};

// Partition of a module's parameters into those with and without weight decay, each parameter once (a tied one by its
// first name). Without weight decay (`spared`): vectors and scalars (biases, and the weights of nearly all norms),
// parameters with "bias" in their own name, and torch::nn::LayerNorm's weights of any shape. Move others, such as
// embeddings, by hand. `module`: a module, its holder or a pointer to it. Not collective.
DecaySplit split_by_decay(detail::ModuleRef module);

template <class Options>
struct DecayGroups {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  Options defaults;
};

// Two param groups for an optimizer: parameters with weight decay, and the rest with weight_decay 0. `Options`:
// libtorch's, shoal's, or any that is constructed from a learning rate and has weight_decay.
//
//   const auto [groups, defaults] =
//       shoal::decay_groups(model, torch::optim::AdamWOptions(1e-3).weight_decay(0.1));
//   shoal::FusedAdamW optimizer(groups, defaults);
//
// Pass exactly these defaults to the optimizer: libtorch 2.13 takes a group's value that equals the default of its type
// for unset, and replaces it by the optimizer's. The returned defaults therefore have the type's default weight_decay.
template <class Options>
DecayGroups<Options> decay_groups(detail::ModuleRef module, const Options& options) {
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
