#pragma once
// A line of text from every rank of a group that does not communicate yet.

#include <string>
#include <vector>

namespace shoal {

struct WorldState;

// Every rank gives a line for `topic` (unique in the job) and gets those of all ranks, in rank order. Goes through the
// store. Collective over `world_ranks`; `rank` is this rank's place among them. CommError when one of them is dead or
// does not come in time.
std::vector<std::string> store_gather(const WorldState& world, const std::string& topic,
                                      const std::vector<int>& world_ranks, int rank, const std::string& own);

}  // namespace shoal
