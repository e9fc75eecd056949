#pragma once
// GPUs that processes see.

#include <string>
#include <vector>

#include "comm/rendezvous/rendezvous.h"

namespace shoal {

// PCI addresses of the CUDA devices that this process sees, joined by commas; empty without any, or without CUDA.
std::string visible_gpus();

// Whether each rank can have one of the GPUs that it sees for itself. peers: all ranks of the job.
bool gpu_for_each_rank(const std::vector<Peer>& peers);

}  // namespace shoal
