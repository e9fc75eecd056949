#pragma once
// Full optimizer state by parameter name, independent of how it is sharded over ranks.

#include <torch/optim/optimizer.h>

#include <map>
#include <string>

#include "shoal/detail/module_ref.h"
#include "shoal/detail/register_state.h"

namespace shoal {

// State by parameter name (the first name of a tied parameter). Every trainable parameter of the optimizer has an
// entry, which is empty if it was never updated; with a module as source of the names, every one that is the module's. Tensors that follow the parameter (moments) have its shape. Sharded
// strategies with 16-bit parameters store the float32 copy as "main_param".
//
// An optimizer with a loss scaler stores it under grad_scaler_key: numbers "scale", "good_steps", "hysteresis_left".
//
// State from any strategy and number of ranks can be loaded by any other with the same optimizer. If only one of the
// two has a scaler there is a warning: the loaded scaler is dropped, or the optimizer's keeps its initial state.
using OptimizerState = std::map<std::string, NamedState>;

inline constexpr const char* grad_scaler_key = ".grad_scaler";  // parameter names never begin with a dot

// Of loaded state that has its parameter's shape and is floating-point. of_parameters: that of what the optimizer updates,
// as in PyTorch's load_state_dict(); kept: that of the loaded tensor.
enum class StateDtypes { of_parameters, kept };

// State of an optimizer that is not sharded: a copy, and its inverse. `module`: source of the parameter names, a module, its
// holder or a pointer to it; where the optimizer trains several modules, call them for each.
// load_optimizer_state throws UsageError, which names the parameter, for entries that are missing, extra or of another
// shape; nothing changes then.
OptimizerState optimizer_state(const torch::optim::Optimizer& optimizer, detail::ModuleRef module);
void load_optimizer_state(torch::optim::Optimizer& optimizer, detail::ModuleRef module, const OptimizerState& state,
                          StateDtypes dtypes = StateDtypes::of_parameters);

}  // namespace shoal
