#pragma once
// One chunk of a model: its gradient buffers and its parameters, laid out alike.

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/sharded/shard_groups.h"
#include "engine/sharded/sharded_module.h"
#include "module/walk.h"
#include "shoal/megatron.h"

namespace shoal {

// The groups of an optimizer over `group`. UsageError for options that hosts of different numbers of ranks do not
// support. Collective.
ShardGroups groups_of(const Group& group, const DistributedOptimizerOptions& options);

// Moves parameters, which are equal on all ranks, into buffers, unless they are gathered in their gradients'.
// `element_wise`: equal ranges of each buffer, else whole parameters. prefix: of the parameters' names in a hook's
// state. Collective.
std::shared_ptr<ShardedModule> make_chunk(const ModuleTensors& tensors, const ShardGroups& groups,
                                          const DistributedOptimizerOptions& options, bool element_wise,
                                          const std::string& prefix);

// The parameter's number in the chunk's reducer; none for another chunk's.
std::optional<size_t> gradient_of(const ShardedModule& chunk, const at::Tensor& parameter);

// The gradient's place in its buffer, undefined where the buffer has no memory.
at::Tensor main_grad(const ShardedModule& chunk, size_t gradient);

// Pieces that a rank of the reducer's group owns.
std::vector<ParameterRange> ranges(const ShardedModule& chunk, int rank);

}  // namespace shoal
