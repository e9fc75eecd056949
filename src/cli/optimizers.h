#pragma once

#include <torch/optim/optimizer.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace shoal::cli {

std::vector<std::string> optimizer_names();
// With the hyper-parameters of the reference runs; all parameters in one group. `lr` replaces the default rate.
std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::string& name, std::vector<at::Tensor> parameters,
                                                        std::optional<double> lr);

// What the optimizer keeps beside the parameters: moments, momentum.
std::vector<at::Tensor> state_tensors(const torch::optim::Optimizer& optimizer);

}  // namespace shoal::cli
