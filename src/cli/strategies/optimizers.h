#pragma once
// Optimizers that the command line names.

#include <torch/optim/optimizer.h>

#include <string>
#include <vector>

#include "cli/train/train_options.h"
#include "shoal/strategy.h"

namespace shoal::cli {

std::vector<std::string> optimizer_names();
// UsageError for options that the optimizer does not accept.
void check_optimizer(const TrainOptions& options);
// With the hyper-parameters of the reference runs, unless the options give others.
OptimizerRecipe recipe_of(const TrainOptions& options);

// Number of elements kept per element, whatever the sizes. UsageError for an optimizer for which it depends on sizes.
int state_per_element(const std::string& name);

}  // namespace shoal::cli
