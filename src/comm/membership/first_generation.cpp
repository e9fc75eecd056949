#include "comm/membership/first_generation.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "comm/group/text.h"
#include "comm/membership/store_table.h"
#include "shoal/error.h"

namespace shoal {
namespace {

constexpr uint64_t first_generation = 1;

MemberCard first_card(int ranks) {
  MemberList members(static_cast<size_t>(ranks));
  std::iota(members.begin(), members.end(), 0);
  return {.number = first_generation, .members = std::move(members)};
}

std::shared_ptr<PatientStore> patient_connection(const WorldState& state) {
  return std::make_shared<PatientStore>(connect_to_job(state.placement, state.options.rendezvous_timeout_seconds));
}

bool is_over_hosts(const WorldState& state) {
  return state.local_size < state.placement.size || state.join.over_hosts;
}

// A program that gives its store may see a part of its keys, so that the prefix of the meeting is not enough to tell
// two boards apart.
StoreBoardOptions between_hosts(const WorldCell& cell, const std::shared_ptr<JoinTable>& joins,
                                std::chrono::milliseconds silence) {
  const auto& state = *cell.state;
  const auto& place = state.placement;
  const std::chrono::seconds timeout(state.options.rendezvous_timeout_seconds);
  StoreBoardOptions options{.generation = place.generation, .timeout = timeout};
  options.table = std::dynamic_pointer_cast<StoreTable>(joins);
  options.joins = state.join.number.has_value();
  if (options.joins) {
    options.prefix = options.table->prefix();
    options.store = options.table->store();
    options.store->set_silence(silence);
    return options;
  }
  const auto own = fmt::format("{:08x}{:08x}", std::random_device()(), std::random_device()());
  const auto board = broadcast_text(cell.group, own, 0, {-1, -1, "Elastic's board between hosts"});
  options.prefix = state.meeting.prefix + "/board/" + board;
  options.store = options.table ? options.table->store() : patient_connection(state);
  options.store->set_silence(silence);
  if (options.table) {
    options.table->open(options.prefix);
    if (place.rank == 0) options.table->make(state.meeting.peers);
  }
  return options;
}

}  // namespace

// A newcomer's own entry is not in the table before it knocks.
std::vector<Peer> first_peers(const WorldState& state) {
  if (!state.join.number) return state.meeting.peers;
  auto peers = state.join.table->peers();
  const auto own = static_cast<size_t>(*state.join.number);
  peers.resize(std::max(peers.size(), own + 1));
  peers[own] = state.meeting.peers.front();
  return peers;
}

std::shared_ptr<Board> first_board(const WorldCell& cell, const std::vector<Peer>& peers,
                                   const std::shared_ptr<JoinTable>& joins, std::chrono::milliseconds silence) {
  const auto& state = *cell.state;
  auto options = is_over_hosts(state) ? std::optional(between_hosts(cell, joins, silence)) : std::nullopt;
  if (state.join.number) {
    return std::make_shared<Board>(state.memory, *state.join.number, peers, nullptr, std::move(options));
  }
  return std::make_shared<Board>(state.memory, state.placement.rank, peers, std::move(options));
}

std::shared_ptr<JoinTable> table_of(const WorldState& state) {
  const auto& join = state.join;
  if (join.number) return join.table;
  if (!join.over_hosts) return is_over_hosts(state) ? nullptr : join.table;  // which lies in the memory of one host
  return std::make_shared<StoreTable>(patient_connection(state), state.placement.generation, *join.over_hosts);
}

const std::shared_ptr<WorldCell>& fresh_cell(const World& world) {
  const auto& cell = cell_of(world);
  if (cell->state->watch) {
    throw UsageError(
        "this world has an Elastic already, or has had one: put several models into one module with one wrapper and "
        "one optimizer; for a later training, while no rank has ended, make another world (shoal::init; in Python "
        "init_process_group() after destroy_process_group())");
  }
  if (!cell->state->memory) {
    throw UsageError("an elastic job needs memory that its ranks share, and this system gave none");
  }
  return cell;
}

Membership first_membership(const WorldState& state) {
  if (state.join.number) return Membership(*state.join.number);
  return {state.placement.rank, first_card(state.placement.size)};
}

}  // namespace shoal
