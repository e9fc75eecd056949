#pragma once
// Tensors that a FullyShardedDataParallel does not shard: ignored ones, and those of wrapped submodules.

#include <string>
#include <vector>

#include "shoal/fsdp.h"
#include "strategy/fsdp/wrapped_tensors.h"

namespace shoal {

// Names of the ignored parameters and buffers. Warns if the module itself is ignored. UsageError for names that the
// module does not have, for ignored tensors that are sharded already, and for a module that is already sharded as a
// whole.
std::vector<std::string> ignored_names(const torch::nn::Module& module, const FullyShardedDataParallelOptions& options);

// Wrappers of submodules that own parameters of the module.
std::vector<FullyShardedCore*> wrappers_within(const torch::nn::Module& module, const FullyShardedCore& outer);

}  // namespace shoal
