#include "shoal/training.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <set>

#include "checkpoint/on_all_ranks.h"
#include "engine/changes/operator_watch.h"
#include "engine/wrapper/logging.h"
#include "module/walk.h"
#include "shoal/zero.h"
#include "training/parts.h"

namespace shoal {
namespace {

at::DeviceType device_of(const torch::nn::Module& module) {
  const auto parameters = module.parameters();
  return parameters.empty() ? at::kCPU : parameters.front().device().type();
}

}  // namespace

std::vector<at::Tensor> distinct(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> list;
  for (const auto& tensor : tensors) {
    const bool seen =
        std::any_of(list.begin(), list.end(), [&](const at::Tensor& other) { return other.is_same(tensor); });
    if (!seen) list.push_back(tensor);
  }
  return list;
}

OptimizerRecipe::ParamGroups groups_of(const TrainingParts& parts) {
  if (parts.recipe.groups) return parts.recipe.groups(*parts.module);
  std::vector<at::Tensor> list;
  for (const auto& entry : walk(*parts.module, parts.options.ignored).trainable()) list.push_back(entry.tensor);
  OptimizerRecipe::ParamGroups groups;
  groups.emplace_back(std::move(list));
  return groups;
}

TrainingCore::TrainingCore(const TrainingParts& parts)
    : strategy_(parts.strategy),
      module_(parts.module),
      group_(parts.group),
      clip_grad_(parts.options.clip_grad),
      precision_(parts.options.precision),
      device_(device_of(*parts.module)),
      parts_(std::make_shared<const TrainingParts>(parts)) {
  if (!(clip_grad_ >= 0)) throw UsageError(fmt::format("clip_grad {}: give a norm, or 0 for none", clip_grad_));
}

void TrainingCore::require_elastic() {
  if (!strategy_.elastic) {
    throw UsageError(fmt::format("Elastic: strategy {} is not supported: take one of {}", strategy_.name,
                                 fmt::join(elastic_strategies(), ", ")));
  }
  if (updates_in_backward()) {
    throw UsageError(fmt::format(
        "Elastic: strategy {} with optimizer_in_backward is not supported: leave that option out", strategy_.name));
  }
  if (precision_.scaler && dynamic_cast<const OSSCore*>(&optimizer()) != nullptr) {
    throw UsageError(fmt::format(
        "Elastic: strategy {} with a loss scaler is not supported: take ddp, megatron, fsdp or another precision",
        strategy_.name));
  }
}

GroupStatistics TrainingCore::statistics() const {
  auto sum = former_;
  std::set<std::string> counted;
  for (const auto& group : leaving_.empty() ? groups() : leaving_) {
    if (counted.insert(group.name()).second) sum = sum + group.statistics();
  }
  return sum;
}

void TrainingCore::leave_groups() {
  if (leaving_.empty()) leaving_ = groups();  // a change that has failed is followed by another one
}

void TrainingCore::follow(const Group& group) {
  former_ = statistics();
  leaving_.clear();
  group_ = group;
  auto parts = *parts_;
  parts.group = group;
  parts_ = std::make_shared<const TrainingParts>(std::move(parts));
}

std::vector<std::string> TrainingCore::description() const {
  return {"strategy of the registry: " + strategy_.name, fmt::format("clip_grad: {}", clip_grad_),
          fmt::format("precision: {}", in_words(precision_))};
}

void TrainingCore::throw_unsupported(const std::string& what) const {
  throw UsageError(fmt::format("strategy {} does not have {}", strategy_.name, what));
}

void TrainingCore::backward(const at::Tensor& /*loss_sum*/, double /*weight*/) {
  throw_unsupported("a backward with a weight");
}

at::Tensor TrainingCore::scale_loss(const at::Tensor& loss) const {
  return loss;
}

NoSync TrainingCore::no_sync(bool /*accumulate*/) {
  return NoSync(nullptr);
}

Joinable& TrainingCore::joinable() {
  throw_unsupported("a part in Join");
}

void TrainingCore::save_module(const std::filesystem::path& file) {
  if (strategy_.synchronization == Synchronization::independent) {
    if (group_.rank() == 0) shoal::save_module(file, *module_);
    return;
  }
  const auto ranks = active_group().value_or(group_);
  const auto whole = full_parameters();
  on_all_ranks(ranks, "save_module", [&] {
    if (ranks.rank() == 0) shoal::save_module(file, *module_);
  });
}

std::vector<at::Tensor> TrainingCore::gradients() const {
  std::vector<at::Tensor> list;
  for (const auto& parameter : distinct(module_->parameters())) {
    const auto& grad = parameter.grad();
    if (grad.defined() && !is_watchable(grad)) list.push_back(grad);  // a stand-in has no memory
  }
  return list;
}

}  // namespace shoal
