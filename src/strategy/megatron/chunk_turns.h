#pragma once
// Order of the collectives of several chunks that share a group. On every rank chunks take turns, the last one first
// and the first one last, and then anew: so collectives meet whatever chunks a rank runs, and in whatever order. A
// chunk that a rank has not run by the time another one's turn must come contributes nothing to its turn.

#include <memory>
#include <vector>

#include "engine/sharded/sharded_module.h"

namespace shoal {

using ShardedChunks = std::vector<std::shared_ptr<ShardedModule>>;

bool is_turn_of(const ShardedChunks& chunks, size_t number);
// Ends or takes the turns that come before this chunk's.
void finish_before(const ShardedChunks& chunks, size_t number);
// Those that are behind the others take their turns. Collective.
void finish_round(const ShardedChunks& chunks);
// Gives up a round, all of it or what is left of it; the second: only what is left. Collective with the peers' turns.
void abandon_round(const ShardedChunks& chunks);
void abandon_behind(const ShardedChunks& chunks);

// Sums up what local backwards have left, whatever no_sync() says. Collective.
void reduce_local(Reducer& reducer);

}  // namespace shoal
