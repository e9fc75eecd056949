#pragma once
// Named access to an optimizer's state per parameter, for checkpoints and for moving state between ranks.

#include <torch/optim/optimizer.h>

#include <memory>
#include <vector>

#include "shoal/optimizer_state.h"

namespace shoal {

// Whether named_state() and make_state() support the state of `of`.
bool is_state_known(const torch::optim::Optimizer& of);

// The tensors are shared with the state. UsageError if the optimizer's state is not registered.
NamedState named_state(const torch::optim::OptimizerParamState& state);

// Tensors that an optimizer keeps beside its parameters: moments, momentum. UsageError as above.
std::vector<at::Tensor> state_tensors(const torch::optim::Optimizer& optimizer);

// Builds the state that `of` keeps in of.state()[parameter.unsafeGetTensorImpl()] for a parameter of this param group,
// on which the kind of state may depend. Takes the tensors without copying. UsageError if `of` is not registered, or if
// a field is missing or unknown.
std::unique_ptr<torch::optim::OptimizerParamState> make_state(const torch::optim::Optimizer& of, size_t param_group,
                                                              const NamedState& named);

// The number of the param group that has the parameter with this key of of.state(); that of groups, if none of several
// has.
size_t param_group_of(const torch::optim::Optimizer& of, const void* parameter);

// Adds what RMSprop's options need and a loaded state lacks, as zeros: libtorch makes it with the whole state alone.
void complete_states(torch::optim::Optimizer& of);

// As if `of` had never updated the parameter with this key of of.state(): without a state, or with the one that the
// constructor has made (Adagrad).
void reset_state(torch::optim::Optimizer& of, void* parameter);

}  // namespace shoal
