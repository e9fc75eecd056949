#pragma once
// Factory of the optimizer that a rank runs on its share, from the default options that the user passes: as in
// libtorch's constructors, options such as torch::optim::AdamWOptions(1e-3), or only a learning rate.

#include <torch/optim/optimizer.h>

#include <concepts>
#include <functional>
#include <memory>
#include <vector>

namespace shoal {

using OptimizerFactory = std::function<std::unique_ptr<torch::optim::Optimizer>(
    const std::vector<torch::optim::OptimizerParamGroup>& groups)>;

namespace detail {

using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;

// The options of param groups that have none of their own.
template <class Local, class Defaults>
std::unique_ptr<torch::optim::OptimizerOptions> default_options(const Defaults& defaults) {
  static_assert(std::constructible_from<Local, const ParamGroups&, const Defaults&>,
                "shoal: the optimizer cannot be made of param groups and these defaults. Pass the options that its own "
                "constructor takes, such as torch::optim::AdamWOptions(1e-3), or a learning rate.");
  if constexpr (std::derived_from<Defaults, torch::optim::OptimizerOptions>) {
    return std::make_unique<Defaults>(defaults);
  } else if constexpr (std::constructible_from<Local, const ParamGroups&, const Defaults&>) {
    return Local(ParamGroups(), defaults).defaults().clone();
  }
}

// Makes the optimizer of a share.
template <class Local, class Defaults>
auto local_optimizer_maker(const Defaults& defaults) {
  return [defaults](const ParamGroups& share) { return std::make_unique<Local>(share, defaults); };
}

}  // namespace detail

}  // namespace shoal
