#pragma once
// What optimizers in the shape of torch::optim's have in common.

#include <torch/optim/optimizer.h>
#include <torch/optim/serialize.h>

#include <memory>
#include <utility>
#include <vector>

#include "shoal/error.h"

namespace shoal {

// An optimizer with its own `Options` (with validate(), which throws UsageError listing all faults) and `State` per
// parameter. A parameter group's own options hold as they are: what they do not set has the Options' default, not the
// optimizer's. (libtorch 2.13 drops a group's options unless they are of one of its own types.)
template <class Options, class State>
class OptimizerBase : public torch::optim::Optimizer {
 public:
  using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;

  explicit OptimizerBase(const ParamGroups& groups, Options defaults = {})
      : Optimizer(ParamGroups{}, std::make_unique<Options>(defaults)) {
    defaults.validate();
    for (const auto& group : groups) add_param_group(group);
  }
  explicit OptimizerBase(std::vector<at::Tensor> parameters, Options defaults = {})
      : OptimizerBase(ParamGroups{torch::optim::OptimizerParamGroup(std::move(parameters))}, std::move(defaults)) {}

  // To be called on this class: through a torch::optim::Optimizer& the group's own options are lost. UsageError for
  // options of another type.
  void add_param_group(const torch::optim::OptimizerParamGroup& group) {
    if (group.has_options()) {
      const auto* options = dynamic_cast<const Options*>(&group.options());
      if (options == nullptr) throw UsageError("a param group's options are of another optimizer's type");
      options->validate();
    }
    Optimizer::add_param_group(group);
    if (group.has_options()) param_groups_.back().set_options(group.options().clone());
  }

  void save(torch::serialize::OutputArchive& archive) const override {
    torch::optim::serialize<State, Options>(archive, *this);
  }
  void load(torch::serialize::InputArchive& archive) override {
    torch::optim::serialize<State, Options>(archive, *this);
  }

 protected:
  const Options& options_of(size_t group) const { return static_cast<const Options&>(param_groups_[group].options()); }

  // `fresh` makes the state of a parameter that has none yet.
  template <class Fresh>
  State& state_of(const at::Tensor& parameter, const Fresh& fresh) {
    auto& slot = state_[parameter.unsafeGetTensorImpl()];
    if (!slot) slot = std::make_unique<State>(fresh());
    return static_cast<State&>(*slot);
  }
};

}  // namespace shoal
