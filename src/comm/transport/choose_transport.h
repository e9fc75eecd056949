#pragma once
// Choice of a group's transport.

#include <memory>
#include <string>
#include <vector>

#include "comm/transport/transport.h"

namespace shoal {

struct WorldState;

// Name of the group of all ranks.
constexpr const char* world_group_name = "world";

// Chooses the transport of these ranks from WorldOptions::transport and from where the ranks run. Collective over them;
// `rank` is this rank's place among them. UsageError if the requested transport cannot serve them. limit: of each wait
// for the others.
std::shared_ptr<Transport> choose_transport(const WorldState& world, const std::string& name, int rank,
                                            const std::vector<int>& world_ranks, Milliseconds limit);

}  // namespace shoal
