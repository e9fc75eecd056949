#pragma once
// Base class of shoal's optimizers, in the shape of torch::optim's.

#include <torch/optim/optimizer.h>
#include <torch/optim/serialize.h>

#include <memory>
#include <utility>
#include <vector>

#include "shoal/error.h"

namespace shoal::detail {

// UsageError that says which parameter of `of` has the state of another optimizer, as a checkpoint may have brought it.
[[noreturn]] void refuse_state(const torch::optim::Optimizer& of, const at::Tensor& parameter);

// The parameter's state as `State`; UsageError for that of another optimizer.
template <class State>
State& state_as(const torch::optim::Optimizer& of, const at::Tensor& parameter,
                torch::optim::OptimizerParamState& state) {
  auto* found = dynamic_cast<State*>(&state);
  if (found == nullptr) refuse_state(of, parameter);
  return *found;
}

// Optimizer with its own `Options`, whose validate() throws UsageError with a list of all invalid options, and its own
// `State` per parameter. Options of a param group are used as they are: a field that is not set has the default of
// `Options`, not of the optimizer. (libtorch 2.13 drops a group's options unless they are of a libtorch type.)
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

  // Adds a param group. Call it on this class: through torch::optim::Optimizer& the group's own options are lost.
  // Throws UsageError for options of another type.
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

  // State of a parameter; `fresh` creates it on first use.
  template <class Fresh>
  State& state_of(const at::Tensor& parameter, const Fresh& fresh) {
    auto& slot = state_[parameter.unsafeGetTensorImpl()];
    if (!slot) slot = std::make_unique<State>(fresh());
    return static_cast<State&>(*slot);
  }

  // Calls check(parameter, state, options) for each parameter of these updates that has state, before anything changes.
  // UsageError for a state of another type, which a checkpoint may have brought.
  template <class Groups, class Check>
  void check_states(const Groups& groups, const Check& check) const {
    for (size_t i = 0; i < groups.size(); ++i) {
      for (const auto& update : groups[i]) {
        const auto found = state_.find(update.parameter.unsafeGetTensorImpl());
        if (found == state_.end()) continue;
        check(update.parameter, std::as_const(state_as<State>(*this, update.parameter, *found->second)), options_of(i));
      }
    }
  }
};

}  // namespace shoal::detail
