#pragma once
// Transport over NCCL, of GPU tensors.

#include <string>

#include "comm/transport/by_device.h"

namespace shoal {

struct WorldState;

// Whether this build includes NCCL; without it, nccl_side throws UsageError.
bool nccl_is_built();

// NCCL for collectives on CUDA tensors; each rank needs a GPU of its own. It is made and connects at the first of them.
// UsageError if libtorch has another version of NCCL than the headers. `world` must live
// as long as the group.
DeviceSide nccl_side(const WorldState& world, const std::string& name, int rank, int size);

}  // namespace shoal
