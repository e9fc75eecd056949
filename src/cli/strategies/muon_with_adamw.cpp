#include "cli/strategies/muon_with_adamw.h"

#include <torch/nn/modules/embedding.h>
#include <torch/utils.h>

#include <set>

#include "optim/state.h"

namespace shoal::cli {
namespace {

// Registers the optimizer's state. The kinds of state themselves are registered already, and show which part keeps
// them.
void know_state() {
  static const bool known = [] {
    detail::add_state_kind({
        .is_kept_by =
            [](const torch::optim::Optimizer& of) { return dynamic_cast<const MuonWithAdamW*>(&of) != nullptr; },
        .matches = [](const torch::optim::OptimizerParamState&) { return false; },
        .read = {},
        .make =
            [](const NamedState& named, const std::string&) {
              const std::vector<at::Tensor> any{at::empty({1, 1})};
              return named.tensors.contains("momentum_buffer") ? make_state(Muon(any), named)
                                                               : make_state(FusedAdamW(any), named);
            },
    });
    return true;
  }();
  static_cast<void>(known);
}

}  // namespace

using torch::optim::AdamWOptions;
using torch::optim::OptimizerParamGroup;

MuonWithAdamW::MuonWithAdamW(const ParamGroups& groups, const MuonOptions& options)
    : Optimizer(groups, std::make_unique<MuonOptions>(options)),
      muon_(ParamGroups{OptimizerParamGroup(groups.at(0).params())}, options),
      adamw_(ParamGroups{OptimizerParamGroup(groups.at(1).params())}, AdamWOptions(options.lr())) {
  know_state();
}

MuonWithAdamW::ParamGroups MuonWithAdamW::groups_of(const torch::nn::Module& module) {
  std::set<const c10::TensorImpl*> embeddings;
  for (const auto& part : module.modules()) {
    const auto* embedding = dynamic_cast<const torch::nn::EmbeddingImpl*>(part.get());
    if (embedding != nullptr) embeddings.insert(embedding->weight.unsafeGetTensorImpl());
  }
  std::vector<at::Tensor> matrices;
  std::vector<at::Tensor> others;
  for (const auto& parameter : module.parameters()) {
    const bool hidden = parameter.dim() == 2 && embeddings.count(parameter.unsafeGetTensorImpl()) == 0;
    (hidden ? matrices : others).push_back(parameter);
  }
  ParamGroups groups;
  groups.emplace_back(std::move(matrices));
  groups.emplace_back(std::move(others));
  return groups;
}

// Lends the shared state to a part while it steps: checkpoints and counters look for the state in this object.
void MuonWithAdamW::update(torch::optim::Optimizer& part) {
  std::swap(part.state(), state_);
  part.step();
  std::swap(part.state(), state_);
}

at::Tensor MuonWithAdamW::step(LossClosure closure) {
  at::Tensor loss;
  if (closure != nullptr) {
    const at::AutoGradMode grad(true);
    loss = closure();
  }
  muon_.param_groups()[0].set_options(param_groups_[0].options().clone());
  const auto& given = static_cast<const MuonOptions&>(param_groups_[1].options());
  auto& adamw = static_cast<AdamWOptions&>(adamw_.param_groups()[0].options());
  adamw.lr(given.lr()).weight_decay(given.weight_decay());
  update(muon_);
  update(adamw_);
  return loss;
}

}  // namespace shoal::cli
