#pragma once

#include <memory>
#include <string>

#include "comm/transport/transport.h"

namespace shoal {

struct WorldState;

// Whether this build includes NCCL; without it, make_nccl_transport throws UsageError.
bool nccl_is_built();

// NCCL, for CUDA tensors only; each rank needs a GPU of its own. Connects at the first operation on each device.
// UsageError if this process sees no GPU.
std::shared_ptr<Transport> make_nccl_transport(const WorldState& world, const std::string& name, int rank, int size);

}  // namespace shoal
