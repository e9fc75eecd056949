#pragma once
// Connections between all ranks of a group.

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "comm/tcp/link.h"

namespace shoal {
struct WorldState;
}

namespace shoal::tcp {

// One connection to every other rank, by rank; nullptr for this one. Both ends of each have proved that they belong to
// the job. Collective over `world_ranks`, of which `rank` is this rank's place. CommError if a rank is dead, cannot be
// reached or does not arrive within the limit.
std::vector<std::unique_ptr<Link>> connect_ranks(const WorldState& world, const std::string& group, int rank,
                                                 const std::vector<int>& world_ranks, std::chrono::milliseconds limit);

}  // namespace shoal::tcp
