#include "training/strategies/replicated.h"

#include "engine/changes/operator_watch.h"
#include "engine/gradients/gradient_norm.h"

namespace shoal {

ReplicatedTraining::ReplicatedTraining(const TrainingParts& parts)
    : ScaledTraining(parts), optimizer_(parts.recipe.make(groups_of(parts))) {}

// Of what the optimizer updates, which is the same on all ranks; a module may have more, which TrainingOptions::ignored
// leaves to the program. Each once, though the recipe's groups may list a tied parameter under each of its names.
std::vector<at::Tensor> ReplicatedTraining::gradients() const {
  std::vector<at::Tensor> parameters;
  for (const auto& group : optimizer_->param_groups()) {
    parameters.insert(parameters.end(), group.params().begin(), group.params().end());
  }
  std::vector<at::Tensor> list;
  for (const auto& parameter : distinct(parameters)) {
    if (parameter.grad().defined() && !is_watchable(parameter.grad())) list.push_back(parameter.grad());
  }
  return list;
}

bool ReplicatedTraining::step() {
  const bool found = scaler_ && scaler_->unscale(gradients());
  if (scaler_) scaler_->update(found);
  if (!found && clip_grad_ > 0) clip_to_norm(gradients(), local_norm(gradients(), 2), clip_grad_);
  update(!found);
  return !found;
}

OptimizerState ReplicatedTraining::optimizer_state() {
  return shoal::optimizer_state(*optimizer_, *module_);
}

std::optional<TrainingState> ReplicatedTraining::state() {
  return scaled(TrainingState(module_, *optimizer_, group_));
}

}  // namespace shoal
