#pragma once
// Beginning of an elastic job's generations: the world of its first ranks, or of a newcomer, which is alone.

#include <chrono>
#include <memory>
#include <vector>

#include "comm/membership/board.h"
#include "comm/membership/join_table.h"
#include "comm/membership/membership.h"
#include "comm/rendezvous/world_state.h"

namespace shoal {

// UsageError for a world that has or has had generations, or has no memory that its ranks share.
const std::shared_ptr<WorldCell>& fresh_cell(const World& world);
// The table of the job's processes; nullptr: nobody can join.
std::shared_ptr<JoinTable> table_of(const WorldState& state);
// By member.
std::vector<Peer> first_peers(const WorldState& state);
// With several hosts, collective over the first ranks.
std::shared_ptr<Board> first_board(const WorldCell& cell, const std::vector<Peer>& peers,
                                   const std::shared_ptr<JoinTable>& joins, std::chrono::milliseconds silence);
Membership first_membership(const WorldState& state);

}  // namespace shoal
