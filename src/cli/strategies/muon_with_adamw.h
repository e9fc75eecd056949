#pragma once
// Optimizer that uses Muon for the matrices of hidden layers and AdamW for everything else.

#include <torch/nn/module.h>

#include <vector>

#include "shoal/optim.h"

namespace shoal::cli {

class MuonWithAdamW : public torch::optim::Optimizer {
 public:
  using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;

  // The first group is Muon's, the second AdamW's, which takes learning rate and weight decay from it, so that both can
  // share a schedule: see MuonRate::match_rms_adamw.
  MuonWithAdamW(const ParamGroups& groups, const MuonOptions& options);
  // Param groups for a module's parameters.
  static ParamGroups groups_of(const torch::nn::Module& module);

  at::Tensor step(LossClosure closure = nullptr) override;

 private:
  void update(torch::optim::Optimizer& part);

  Muon muon_;
  FusedAdamW adamw_;
};

}  // namespace shoal::cli
