#pragma once

#include <torch/optim/optimizer.h>

#include <string>
#include <vector>

#include "cli/train/train_options.h"
#include "shoal/training.h"

namespace shoal::cli {

std::vector<std::string> optimizer_names();
// Throws UsageError for options that the optimizer does not take.
void check_optimizer(const TrainOptions& options);
// With the hyper-parameters of the reference runs, where the options do not say others.
OptimizerRecipe recipe_of(const TrainOptions& options);

// How many elements the optimizer keeps for a parameter of these sizes in its param group of this number.
int64_t state_numel(const std::string& name, at::IntArrayRef sizes, size_t group);
// Those it keeps per element whatever the sizes. Throws UsageError for one that looks at them.
int state_per_element(const std::string& name);

// What the optimizer keeps beside the parameters: moments, momentum.
std::vector<at::Tensor> state_tensors(const torch::optim::Optimizer& optimizer);

}  // namespace shoal::cli
