#pragma once
// Host transport: ranks of one host that read and write each other's memory.

#include <memory>
#include <string>
#include <vector>

#include "comm/transport/transport.h"

namespace shoal {
struct WorldState;
}  // namespace shoal

namespace shoal::shm {

struct HostTransport {
  std::shared_ptr<Transport> transport;  // nullptr: not possible
  std::string why_not;                   // "rank 3 is on another host"
};

// Collective over `world_ranks`; all of them get a transport or none does. Requires that all ranks run on one host as
// the same user, and that each can open every other one's memory. limit: of each wait for the others.
HostTransport make_host_transport(const WorldState& world, const std::string& name, int rank,
                                  const std::vector<int>& world_ranks, Milliseconds limit);

}  // namespace shoal::shm
