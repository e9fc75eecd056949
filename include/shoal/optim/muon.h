#pragma once
// Muon: momentum whose matrices are made orthogonal before they are applied. Jordan et al., "Muon: An optimizer for
// hidden layers in neural networks" (2024); the second rate is from Liu et al., "Muon is Scalable for LLM Training"
// (2025).

#include <tuple>

#include "shoal/optim/optimizer_base.h"

namespace shoal {

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

}  // namespace shoal
