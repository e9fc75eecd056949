#pragma once
// Supported dtypes of parameters, and those that need a loss scaler.

#include <vector>

#include "module/walk.h"
#include "shoal/megatron.h"

namespace shoal {

// `trainable`: of all chunks, with their prefixes. UsageError that names a parameter. Collective over the
// model_parallel_group, whose other stages may have the parameters that need a scaler.
void check_dtypes(const std::vector<NamedTensor>& trainable, const DistributedOptimizerOptions& options);

}  // namespace shoal
