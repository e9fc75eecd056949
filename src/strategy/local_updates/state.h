#pragma once
// State of LocalUpdates.

#include <set>
#include <vector>

#include "engine/reducer/reducer.h"
#include "engine/wrapper/parameter_watch.h"
#include "module/known_module.h"
#include "module/walk.h"
#include "optim/param_groups.h"
#include "strategy/local_updates/fragment.h"

namespace shoal {

// One line per option, for agree().
std::vector<std::string> describe(const LocalUpdatesOptions& options);

struct LocalUpdates::State {
  State(std::shared_ptr<torch::nn::Module> of, torch::optim::Optimizer& inner, const Group& over, ModuleTensors walked,
        const LocalUpdatesOptions& chosen);

  // UsageError for a parameter of the module or the optimizer that would be trained but never averaged.
  void check_trainable() const;
  // Call before a step: handles parameters that the caller replaced or wrote since the last one.
  void adopt_changes();
  // Runs the exchanges that are due after a step, and counts the step.
  void end_step();
  // See state_dict(); the tensors are this object's own and valid until the next step.
  OptimizerState named_state();
  // Restarts from the parameters' present values, as after construction. Waits for exchanges in flight.
  void start_afresh();
  // Sets the number of steps; creates the reducer in the warm-up, and removes it afterwards.
  void set_steps(int64_t number);
  Mean mean_of(const std::vector<at::Tensor>& tensors, const Label& label) const;
  std::vector<at::Tensor> averaged_buffers() const;

  std::shared_ptr<torch::nn::Module> module;
  torch::optim::Optimizer& optimizer;
  KnownModule known_module{module, "LocalUpdates"};
  KnownParameters known{optimizer.param_groups()};
  Group group;
  LocalUpdatesOptions options;
  ModuleTensors tensors;
  std::set<const c10::TensorImpl*> exchanged;
  std::vector<Fragment> fragments;
  ParameterWatch watch;   // watches the fragments' parameters, in their order
  bool restored = false;  // the parameters' values belong to a loaded state
  int64_t steps = 0;
  std::unique_ptr<Reducer> reducer;  // exists in the warm-up only
};

}  // namespace shoal
