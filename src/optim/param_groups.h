#pragma once
// Param groups of a whole optimizer and of the optimizer that a rank runs on its share.

#include <torch/optim/optimizer.h>

#include <string>
#include <vector>

namespace shoal {

// The same groups with the same options and no parameters.
std::vector<torch::optim::OptimizerParamGroup> empty_like(const std::vector<torch::optim::OptimizerParamGroup>& groups);

// Gives `share` the present options of `groups`: a scheduler may have changed them.
void copy_options(const std::vector<torch::optim::OptimizerParamGroup>& groups, torch::optim::Optimizer& share);

// One line per group and parameter, for agree().
std::vector<std::string> describe(const std::vector<torch::optim::OptimizerParamGroup>& groups);

}  // namespace shoal
