#pragma once
// State of a DistributedOptimizer besides that of all sharded optimizers.

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "module/walk.h"
#include "shoal/megatron.h"
#include "strategy/megatron/declared_gradients.h"

namespace shoal {

struct DistributedOptimizerCore::Reduction {
  Modules modules;
  DistributedOptimizerOptions options;
  std::vector<std::vector<std::string>> ignored;  // by module
  DeclaredGradients declared{};
  std::function<void()> before_backward{};  // empty: nothing
  std::optional<double> share{};            // see ReducerCallbacks
  int no_sync_depth = 0;
  bool told_abandoned = false;  // the last step has ended here with StepAbandoned
  bool reduced = false;  // without overlap: by reduce_model_grads() since the last step, and no backward here since

  ModuleTensors tensors(size_t number) const { return walk(*modules[number], ignored[number]); }
};

}  // namespace shoal
