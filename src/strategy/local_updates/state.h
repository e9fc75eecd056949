#pragma once
// State of LocalUpdates.

#include <set>
#include <vector>

#include "engine/changes/loads.h"
#include "engine/changes/parameter_watch.h"
#include "engine/reducer/reducer.h"
#include "module/known_module.h"
#include "module/walk.h"
#include "optim/param_groups.h"
#include "strategy/local_updates/fragment.h"

namespace shoal {

// One line per option, for agree().
std::vector<std::string> describe(const LocalUpdatesOptions& options);

// Of the message that sends a fragment after a step.
inline Label sent_as(int64_t step, size_t fragment) {
  return {step, static_cast<int64_t>(fragment), "parameters, or their movement"};
}

struct LocalUpdates::State {
  State(std::shared_ptr<torch::nn::Module> of, torch::optim::Optimizer& inner, const Group& over, ModuleTensors walked,
        const LocalUpdatesOptions& chosen);

  // UsageError for a parameter of the module or the optimizer that would be trained but never averaged.
  void check_trainable() const;
  // Takes the parameters' values as this object's own.
  void note() {
    watch.note();
    loads.clear();
  }
  // Call before a step: handles parameters that the caller replaced or wrote since the last one.
  void adopt_changes();
  // After the optimizer's step.
  void count_step();
  // Exchanges after a step, in two parts. The first communicates and changes no values, so that it may be run again;
  // the second applies what has come.
  bool exchange_due() const;
  // With SlowMo, whose update of theta uses them: one line per param group.
  std::vector<std::string> rates() const;
  // DisagreeError if they differ, but for their last digits. Collective.
  void require_equal_rates() const;
  void exchange();
  void apply_exchange();
  // See state_dict(); the tensors are this object's own and valid until the next step. in_flight: whether exchanges in
  // flight belong to it, which are then waited for; a newcomer gets none, but the learning rates that belong to them.
  OptimizerState named_state(bool in_flight = true);
  // See load_state_dict().
  void load(const OptimizerState& whole, bool in_flight);
  // UsageError if load() would refuse it.
  void check(const OptimizerState& whole, bool in_flight) const;
  // Adds entries of parameters that begin now, with the mean of their values: they were frozen when `whole` was saved.
  // Collective if there are any.
  void complete(OptimizerState& whole) const;
  // Restarts from the parameters' present values, as after construction, where ranks differ from their mean. Waits for
  // exchanges in flight. Collective.
  void start_afresh();
  // Sets the number of steps; creates the reducer in the warm-up, and removes it afterwards.
  void set_steps(int64_t number);
  Mean mean_of(const std::vector<at::Tensor>& tensors, const Label& label) const;
  std::vector<at::Tensor> averaged_buffers() const;
  // Parameters that are exchanged, fragment by fragment.
  std::vector<at::Tensor> parameters() const;

  // For Elastic. Goes on in another group; an exchange that is in flight is sent again, with the present values. It may
  // be called again if it fails. Collective.
  void regroup(const Group& to);
  // Gives newcomers among the group's ranks the mean of the others' parameters. Collective.
  void give_mean(const Group& to, const std::vector<bool>& newcomers);

  std::shared_ptr<torch::nn::Module> module;
  torch::optim::Optimizer& optimizer;
  KnownModule known_module{module, "LocalUpdates"};
  KnownParameters known{optimizer.param_groups()};
  Group group;
  LocalUpdatesOptions options;
  ModuleTensors tensors;
  std::set<const c10::TensorImpl*> exchanged;
  std::vector<Fragment> fragments;
  Mean buffer_mean{};     // of an exchange that has not been applied
  ParameterWatch watch;   // watches the fragments' parameters, in their order
  bool restored = false;  // the parameters' values belong to a loaded state
  Loads loads{};
  int means_shown = 0;          // scopes of mean_parameters()
  bool changes_shared = false;  // before an admission: newcomers get the changed parameters, and what follows from them
  int64_t steps = 0;
  int64_t steps_exchanged = 0;  // steps whose exchanges have been applied
  // Who runs exchanges: step(), or Elastic, which allows one step() in each of its own.
  enum class Turn { free, one_step, no_step } turn = Turn::free;
  std::unique_ptr<Reducer> reducer;  // exists in the warm-up only
};

LocalUpdates::State& state_of(LocalUpdates& updates);

}  // namespace shoal
