#pragma once
// Named access to what an optimizer keeps per parameter, for checkpoints and for moving state between ranks.

#include <torch/optim/optimizer.h>

#include <memory>

#include "shoal/detail/register_state.h"

namespace shoal {

// Whether named_state() and make_state() know what `of` keeps.
bool is_state_known(const torch::optim::Optimizer& of);

// The tensors are the state's own. UsageError for a state of an optimizer that is not registered.
NamedState named_state(const torch::optim::OptimizerParamState& state);

// A state as `of` keeps it; goes into of.state()[parameter.unsafeGetTensorImpl()]. Takes the tensors, does not copy
// them. UsageError when `of` is not registered, and when a field is missing or none of its own.
std::unique_ptr<torch::optim::OptimizerParamState> make_state(const torch::optim::Optimizer& of,
                                                              const NamedState& named);

}  // namespace shoal
