// Muon and AdamW as one optimizer: each steps its own param groups on state that lies here.

#include <torch/nn/modules/embedding.h>
#include <torch/utils.h>

#include <set>

#include "optim/state.h"
#include "shoal/optim.h"

namespace shoal {
namespace {

using torch::optim::AdamWOptions;
using torch::optim::OptimizerParamGroup;

// Registers the optimizer's state. The kinds of state themselves are registered already; of which a parameter's is, its
// param group says.
void know_state() {
  static const bool known = [] {
    detail::add_state_kind({
        .is_kept_by =
            [](const torch::optim::Optimizer& of) { return dynamic_cast<const MuonWithAdamW*>(&of) != nullptr; },
        .matches = [](const torch::optim::OptimizerParamState&) { return false; },
        .read = {},
        .make = {},
    });
    return true;
  }();
  static_cast<void>(known);
}

// Checks what is Muon's.
void check_first(const MuonWithAdamW::ParamGroups& groups) {
  if (!groups.empty()) Muon(MuonWithAdamW::ParamGroups{OptimizerParamGroup(groups.front().params())});
}

}  // namespace

MuonWithAdamW::MuonWithAdamW(const ParamGroups& groups, MuonWithAdamWOptions defaults)
    : OptimizerBase(ParamGroups(), defaults.muon),
      given_(std::move(defaults)),
      muon_(ParamGroups(), given_.muon),
      adamw_(ParamGroups(), AdamWOptions(given_.muon.lr()).betas(given_.betas).eps(given_.eps)) {
  know_state();
  for (const auto& group : groups) add_param_group(group);
}

MuonWithAdamW::MuonWithAdamW(const ParamGroups& groups, const MuonOptions& defaults)
    : MuonWithAdamW(groups, MuonWithAdamWOptions{.muon = defaults}) {}

MuonWithAdamW::ParamGroups MuonWithAdamW::groups_of(detail::ModuleRef of) {
  const torch::nn::Module& module = of;
  std::set<const c10::TensorImpl*> embeddings;
  const auto add = [&](const auto* embedding) {
    if (embedding != nullptr) embeddings.insert(embedding->weight.unsafeGetTensorImpl());
  };
  const auto note = [&](const torch::nn::Module& part) {
    add(dynamic_cast<const torch::nn::EmbeddingImpl*>(&part));
    add(dynamic_cast<const torch::nn::EmbeddingBagImpl*>(&part));
  };
  note(module);
  // include_self would require that the module is in a shared_ptr.
  for (const auto& part : module.modules(/*include_self=*/false)) note(*part);
  std::vector<at::Tensor> matrices;
  std::vector<at::Tensor> others;
  std::set<const c10::TensorImpl*> seen;
  for (const auto& parameter : module.parameters()) {
    if (!seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    const bool hidden = parameter.dim() == 2 && embeddings.count(parameter.unsafeGetTensorImpl()) == 0;
    (hidden ? matrices : others).push_back(parameter);
  }
  ParamGroups groups;
  groups.emplace_back(std::move(matrices));
  groups.emplace_back(std::move(others));
  return groups;
}

void MuonWithAdamW::add_param_group(const OptimizerParamGroup& group) {
  if (param_groups_.empty()) check_first({group});
  OptimizerBase::add_param_group(group);
}

// Lends the state to a part while it steps: checkpoints and counters look for the state in this object.
void MuonWithAdamW::update(torch::optim::Optimizer& part) {
  std::swap(part.state(), state_);
  try {
    part.step();
  } catch (...) {
    std::swap(part.state(), state_);
    throw;
  }
  std::swap(part.state(), state_);
}

at::Tensor MuonWithAdamW::step(LossClosure closure) {
  at::Tensor loss;
  if (closure != nullptr) {
    const at::AutoGradMode grad(true);
    loss = closure();
  }
  // Groups are taken anew in each step, because the program may change them and their options.
  auto &of_muon = muon_.param_groups(), &of_adamw = adamw_.param_groups();
  of_muon.clear();
  of_adamw.clear();
  for (size_t number = 0; number < param_groups_.size(); ++number) {
    const auto& options = options_of(number);
    if (number == 0) {
      of_muon.emplace_back(param_groups_[number].params(), std::make_unique<MuonOptions>(options));
      continue;
    }
    auto of_rest = std::make_unique<AdamWOptions>(options.lr());
    of_rest->weight_decay(options.weight_decay()).betas(given_.betas).eps(given_.eps);
    of_adamw.emplace_back(param_groups_[number].params(), std::move(of_rest));
  }
  update(muon_);
  update(adamw_);
  return loss;
}

void MuonWithAdamW::save(torch::serialize::OutputArchive& /*archive*/) const {
  throw UsageError(
      "MuonWithAdamW: torch::save has no place for two kinds of state: use shoal::save (shoal/checkpoint.h)");
}

void MuonWithAdamW::load(torch::serialize::InputArchive& /*archive*/) {
  throw UsageError(
      "MuonWithAdamW: torch::load has no place for two kinds of state: use shoal::load (shoal/checkpoint.h)");
}

}  // namespace shoal
