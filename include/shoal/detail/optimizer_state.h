#pragma once
// An optimizer's whole state, by names: independent of how it is spread over ranks.

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <map>
#include <string>

#include "shoal/detail/register_state.h"

namespace shoal {

// By name of the parameter (the first of a tied one's). Every trainable parameter of the optimizer has an entry, empty
// where it was never updated. Tensors that follow the parameter (moments) have its shape. Sharded strategies whose
// parameters have 16 bits keep "main_param" in it, the float32 copy.
//
// An optimizer with a loss scaler keeps it under grad_scaler_key: numbers "scale", "good_steps", "hysteresis_left".
//
// It can be taken from any strategy at any number of ranks and given to any other with the same optimizer. A scaler that
// is in only one of the two is a warning: it starts as it is, or is left out.
using OptimizerState = std::map<std::string, NamedState>;

inline constexpr const char* grad_scaler_key = ".grad_scaler";  // no parameter's name begins with a dot

// Of an optimizer that is not sharded: a copy, and the way back. `module`: where the names come from. load: UsageError
// that names the parameter for entries that are missing, extra, or of another shape; nothing has changed then.
OptimizerState optimizer_state(const torch::optim::Optimizer& optimizer, const torch::nn::Module& module);
void load_optimizer_state(torch::optim::Optimizer& optimizer, const torch::nn::Module& module,
                          const OptimizerState& state);

}  // namespace shoal
