#pragma once
// All-gather of a line of text through the store, for a group that cannot communicate yet.

#include <chrono>
#include <string>
#include <vector>

namespace shoal {

struct WorldState;

// Key of the line of the rank with this index.
std::string gathered_key(const WorldState& world, const std::string& topic, size_t of);

// Gathers the lines `own` of all ranks, in rank order. `topic` is unique in the job; `rank` is this rank's index in
// `world_ranks`. Collective over `world_ranks`. Throws CommError if one of them is dead, does not arrive within the
// limit, or has given up before this one came: all go on with another topic, then.
std::vector<std::string> store_gather(const WorldState& world, const std::string& topic,
                                      const std::vector<int>& world_ranks, int rank, const std::string& own,
                                      std::chrono::milliseconds limit);

}  // namespace shoal
