#pragma once
// An optimizer's options by name, for checkpoints and for comparing those of ranks.

#include <torch/optim/optimizer.h>

#include <nlohmann/json.hpp>
#include <string>

namespace shoal {

// "torch::optim::AdamWOptions".
std::string type_of(const torch::optim::OptimizerOptions& options);

// By the names under which they serialize themselves: numbers, truth values, texts, null, and lists of these. Of
// options that do not serialize themselves the learning rate, if they have one.
nlohmann::json named_options(const torch::optim::OptimizerOptions& options);

// Takes those of `named`; the others stay. UsageError for names that these options do not have, and values of another
// kind; nothing has changed then.
void set_options(torch::optim::OptimizerOptions& options, const nlohmann::json& named);

// "betas [0.9,0.999], eps 1e-08, lr 0.001".
std::string describe(const torch::optim::OptimizerOptions& options);

}  // namespace shoal
