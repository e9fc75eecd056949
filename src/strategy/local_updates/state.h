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

  // UsageError for a parameter that would be trained and never exchanged, in the module or in the optimizer.
  void check_trainable() const;
  // Before a step: parameters that the caller has replaced or written since the last one.
  void adopt_changes();
  // The exchanges after a step; counts it.
  void end_step();
  // See state_dict(); the tensors are this object's own, until the next step.
  OptimizerState named_state();
  // As after the construction, from the parameters as they are. Waits for what is on its way.
  void begin_anew();
  // Goes to a step: with a reducer in the warm-up, without it afterwards.
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
  ParameterWatch watch;   // of the fragments' parameters, in their order
  bool restored = false;  // the parameters belong to a loaded state
  int64_t steps = 0;
  std::unique_ptr<Reducer> reducer;  // in the warm-up
};

}  // namespace shoal
