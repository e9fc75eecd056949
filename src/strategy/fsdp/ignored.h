#pragma once
// Tensors that a FullyShardedDataParallel does not shard: ignored ones, and those of wrapped sub-modules.

#include <string>
#include <vector>

#include "shoal/fsdp.h"
#include "strategy/fsdp/taken.h"

namespace shoal {

// Names of these parameters and buffers. Warns when the module itself is among the ignored ones. UsageError for names
// that the module does not have, for what is to be ignored and is sharded already, and for a module that is sharded
// already as a whole.
std::vector<std::string> ignored_names(const torch::nn::Module& module, const FullyShardedDataParallelOptions& options);

// The wrappers of sub-modules that have parameters of their own there.
std::vector<FullyShardedCore*> wrappers_within(const torch::nn::Module& module, const FullyShardedCore& outer);

}  // namespace shoal
