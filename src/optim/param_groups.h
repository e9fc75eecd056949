#pragma once
// Param groups of a sharded optimizer, and of the local optimizer that a rank runs on its shard.

#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace shoal {

using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;

// The groups' options, without parameters.
ParamGroups empty_like(const ParamGroups& groups);

// Calls `make` on a rank's share of the groups. name: of the sharded optimizer, for errors. UsageError if `make`
// refuses them, if their options are not of the same type as `defaults`, and for L-BFGS.
std::unique_ptr<torch::optim::Optimizer> make_local(
    const std::function<std::unique_ptr<torch::optim::Optimizer>(const ParamGroups&)>& make, const ParamGroups& share,
    const torch::optim::OptimizerOptions& defaults, const std::string& name);

// Copies the present options of the groups. Used from the sharded to the local optimizer before each step, because a
// scheduler may have changed them; and from the local to the sharded optimizer after construction, because only the
// local optimizer's class completes a group's own options: libtorch's base class, which the sharded one is, drops
// options of types that it does not know.
void copy_options(const ParamGroups& from, ParamGroups& to);

// Called by torch::save and torch::load of a sharded optimizer: UsageError that names what to call instead.
[[noreturn]] void refuse_archive(const std::string& name);

// One line per group and parameter, for agree().
std::vector<std::string> describe(const ParamGroups& groups);

// Snapshot of the parameters that a sharded optimizer was made for. libtorch's add_param_group(), add_parameters() and
// param_groups() are not virtual, so that changes through the base class can be detected only afterwards.
class KnownParameters {
 public:
  KnownParameters() = default;
  explicit KnownParameters(const ParamGroups& groups);
  // Describes the difference to `now`, such as "param group 1 with a parameter [3, 4] was added"; empty: none.
  std::string change(const ParamGroups& now) const;

 private:
  std::vector<std::vector<at::Tensor>> groups_;
};

}  // namespace shoal
