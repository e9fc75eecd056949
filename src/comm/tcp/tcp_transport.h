#pragma once
// Transport over TCP, for ranks on several hosts: every rank is connected with every other.

#include <memory>
#include <string>
#include <vector>

#include "comm/transport/transport.h"

namespace shoal {

struct WorldState;

// Compares all calls before any data are changed, and reduces in the order of ranks, as the host transport does. A
// thread of its own moves the data while the rank computes. Memory: see tcp/schedule.h; up to 1 MiB per other rank in
// an operation, and nothing between operations. CPU tensors.
//
// Collective over `world_ranks`, of which `rank` is this rank's place. CommError if they cannot be connected. limit: of
// each wait for the others.
std::shared_ptr<Transport> make_tcp_transport(const WorldState& world, const std::string& group, int rank,
                                              const std::vector<int>& world_ranks, Milliseconds limit);

}  // namespace shoal
