#pragma once
// An optimizer's options as text.

#include <torch/optim/optimizer.h>

#include <string>

namespace shoal {

// "betas (0.9, 0.999), eps 1e-08, lr 0.001": what the options say of themselves when they are serialised.
std::string describe_options(const torch::optim::OptimizerOptions& options);

}  // namespace shoal
