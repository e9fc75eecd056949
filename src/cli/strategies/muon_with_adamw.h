#pragma once
// Muon on the matrices of hidden layers, AdamW on everything else: one optimizer.

#include <torch/nn/module.h>

#include <vector>

#include "shoal/optim.h"

namespace shoal::cli {

class MuonWithAdamW : public torch::optim::Optimizer {
 public:
  using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;

  // The first group is Muon's, the second AdamW's, which takes rate and weight decay from it. So both may share a
  // schedule: see MuonRate::match_rms_adamw.
  MuonWithAdamW(const ParamGroups& groups, const MuonOptions& options);
  // Its groups of a module's parameters.
  static ParamGroups groups_of(const torch::nn::Module& module);

  at::Tensor step(LossClosure closure = nullptr) override;

 private:
  void update(torch::optim::Optimizer& part);

  Muon muon_;
  FusedAdamW adamw_;
};

}  // namespace shoal::cli
