#pragma once

#include <memory>
#include <string>

#include "comm/transport/transport.h"

namespace shoal {

struct WorldState;

// Whether this build includes NCCL; without it, make_nccl_transport throws UsageError.
bool nccl_is_built();

// NCCL for CUDA tensors; `host_side` carries other tensors, which NCCL does not accept. Collective; connects at the
// first operation on each device. UsageError if this machine has no GPU.
std::shared_ptr<Transport> make_nccl_transport(const WorldState& world, const std::string& name, int rank, int size,
                                               const std::shared_ptr<Transport>& host_side);

}  // namespace shoal
