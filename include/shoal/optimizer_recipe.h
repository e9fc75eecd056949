#pragma once
// Recipe for an optimizer without parameters: make_training() and decentralised training make optimizers of it.

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "shoal/detail/local_optimizer.h"
#include "shoal/optim.h"

namespace shoal {

// Strategies make one optimizer per rank or per bucket, for pieces of the parameters.
struct OptimizerRecipe {
  using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;

  std::function<ParamGroups(const torch::nn::Module& module)> groups{};  // none: one group of all trainable parameters
  std::shared_ptr<const torch::optim::OptimizerOptions> defaults{};
  OptimizerFactory make{};
  bool element_wise = false;
};

//   shoal::optimizer_recipe<shoal::FusedAdamW>(torch::optim::AdamWOptions(1e-3)), or of a learning rate alone
template <class Optimizer, class Defaults>
OptimizerRecipe optimizer_recipe(const Defaults& defaults, decltype(OptimizerRecipe::groups) groups = {}) {
  return {.groups = std::move(groups),
          .defaults = detail::default_options<Optimizer>(defaults),
          .make = detail::local_optimizer_maker<Optimizer>(defaults),
          .element_wise = element_wise<Optimizer>};
}

}  // namespace shoal
