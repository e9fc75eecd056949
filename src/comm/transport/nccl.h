#pragma once

#include <memory>
#include <string>

#include "comm/transport/transport.h"

namespace shoal {

struct WorldState;

// Whether this build has NCCL; without it, make_nccl_transport throws UsageError.
bool nccl_is_built();

// NCCL for CUDA tensors; `host_side` carries the others, which NCCL does not take. Collective; connects at the first
// operation on each device. Throws UsageError where this machine has no GPU.
std::shared_ptr<Transport> make_nccl_transport(const WorldState& world, const std::string& name, int rank, int size,
                                               const std::shared_ptr<Transport>& host_side);

}  // namespace shoal
