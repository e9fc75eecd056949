#pragma once
// Param groups of a whole optimizer and of the optimizer that a rank runs on its share.

#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace shoal {

using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;

// The same groups with the same options and no parameters.
ParamGroups empty_like(const ParamGroups& groups);

// What `make` makes of a rank's share of the groups. `name`: of the sharded optimizer, for errors. UsageError for what
// it refuses, for options of another optimizer's type than `defaults`, and for L-BFGS.
std::unique_ptr<torch::optim::Optimizer> make_local(
    const std::function<std::unique_ptr<torch::optim::Optimizer>(const ParamGroups&)>& make, const ParamGroups& share,
    const torch::optim::OptimizerOptions& defaults, const std::string& name);

// Gives the groups of `to` the present options of `from`'s. To the share before each step: a scheduler may have changed
// them. To the whole optimizer when the share has been made of the groups as the caller gave them: what becomes of a
// group's own options is known to the local optimizer's class alone, and libtorch's base class, which the whole one is,
// drops those of types that it does not know.
void copy_options(const ParamGroups& from, ParamGroups& to);

// What torch::save and torch::load of a sharded optimizer come to: UsageError that names what to call.
[[noreturn]] void refuse_archive(const std::string& name);

// One line per group and parameter, for agree().
std::vector<std::string> describe(const ParamGroups& groups);

// The parameters that a sharded optimizer was made for. libtorch's add_param_group(), add_parameters() and
// param_groups() are not virtual, so what is changed through the base class shows only afterwards.
class KnownParameters {
 public:
  KnownParameters() = default;
  explicit KnownParameters(const ParamGroups& groups);
  // What is different in `now`, such as "param group 1 with a parameter [3, 4] was added"; empty: nothing.
  std::string change(const ParamGroups& now) const;

 private:
  std::vector<std::vector<at::Tensor>> groups_;
};

}  // namespace shoal
