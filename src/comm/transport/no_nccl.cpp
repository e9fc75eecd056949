// Substitute for nccl.cpp if libtorch has no CUDA or CMake finds no NCCL.

#include "comm/rendezvous/gpus.h"
#include "comm/transport/nccl.h"
#include "shoal/error.h"

namespace shoal {

bool nccl_is_built() {
  return false;
}

std::string visible_gpus() {
  return "";
}

DeviceSide nccl_side(const WorldState&, const std::string&, int, int) {
  throw UsageError(
      "transport nccl is not in this build: build with a CUDA libtorch and the NCCL headers it was made with");
}

}  // namespace shoal
