#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/transport/transport.h"

namespace shoal {

struct WorldState;

// The name of the group of all ranks.
constexpr const char* world_group_name = "world";

// What carries a group of these ranks, by WorldOptions::transport and by where they run. Collective over them; `rank`
// is this rank's place among them. UsageError when the transport asked for cannot carry them.
std::shared_ptr<Transport> choose_transport(const WorldState& world, const std::string& name, int rank,
                                            const std::vector<int>& world_ranks);

}  // namespace shoal
