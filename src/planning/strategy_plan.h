#pragma once
// Planning of one strategy.

#include <functional>
#include <memory>
#include <vector>

#include "shoal/plan.h"

namespace shoal {

// The module that plans are made for. What they have in common is found once, by the first one that needs it.
struct PlannedModule {
  std::shared_ptr<torch::nn::Module> module;
  std::function<at::Tensor()> loss;  // see PlanOptions::loss
  std::vector<size_t> arrival{};     // the order in which backward delivers gradients; empty: not known yet
};

// training: with the options of this strategy alone. Runs the module's forward and backward where buckets follow the
// order of gradients and it is not known yet. Errors as those of plan().
StrategyPlan plan_strategy(const std::string& strategy, PlannedModule& planned, const OptimizerRecipe& recipe,
                           const TrainingOptions& training, int ranks, int hosts, bool one_host, bool elastic = false);

}  // namespace shoal
