#pragma once
// One chunk of a model: its gradient buffers and its parameters, laid out alike.

#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/sharded_module.h"
#include "shoal/strategy/megatron/distributed_optimizer.h"

namespace shoal {

// Gives everybody rank 0's values, then moves parameters into buffers, unless they are gathered in their gradients'.
// `cut`: equal ranges of each buffer, else whole parameters. prefix: of the parameters' names in a hook's state.
// Collective.
std::shared_ptr<ShardedModule> make_chunk(const std::shared_ptr<torch::nn::Module>& module, const Group& group,
                                          const DistributedOptimizerOptions& options, bool cut,
                                          const std::string& prefix);

// The gradient's place in its buffer, undefined where the buffer has no memory; none for another chunk's parameter.
std::optional<at::Tensor> main_grad(const ShardedModule& chunk, const at::Tensor& parameter);

// Pieces that a rank owns.
std::vector<ParameterRange> ranges(const ShardedModule& chunk, int rank);

}  // namespace shoal
