#pragma once
// Ranks of one host that read and write each other's memory.

#include <memory>
#include <string>
#include <vector>

#include "comm/transport/transport.h"

namespace shoal {

struct WorldState;

struct HostTransport {
  std::shared_ptr<Transport> transport;  // none: not possible
  std::string why_not;                   // "rank 3 is on another host"
};

// Collective over `world_ranks`; all of them get a transport or none. Works where all ranks run on one host as one user
// and each can open the memory of every other one.
HostTransport make_host_transport(const WorldState& world, const std::string& name, int rank,
                                  const std::vector<int>& world_ranks);

}  // namespace shoal
