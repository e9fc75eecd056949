#include "comm/membership/survivors.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <set>
#include <utility>
#include <vector>

#include "comm/group/group_state.h"
#include "comm/membership/patience.h"
#include "comm/rendezvous/world_state.h"
#include "comm/shm/wait.h"
#include "shoal/detail/clock.h"
#include "shoal/error.h"

namespace shoal {

Survivors::Survivors(const Group& group) : group_(group), world_(state_of(group)->world), watch_(world_->watch) {
  if (!watch_) throw UsageError("the world of this group is not that of an elastic job");
}

bool Survivors::ended(int rank) const {
  return watch_->ended(in_world(rank));
}

bool Survivors::absent(int rank) const {
  return ended(rank) || watch_->left_behind(in_world(rank));
}

int Survivors::acting_rank() const {
  int rank = 0;
  while (rank != group_.rank() && absent(rank)) ++rank;
  return rank;
}

shm::PeerMemory& Survivors::peer(int rank) const {
  return *world_->memory->peer(world_->meeting.peers[static_cast<size_t>(in_world(rank))].page);
}

void Survivors::ring() const {
  for (int rank = 0; rank < group_.size(); ++rank) {
    if (rank != group_.rank()) peer(rank).ring();
  }
}

void Survivors::wait(const std::string& what, const std::function<bool()>& done,
                     const std::function<bool(int rank)>& late) const {
  // Twice, as elsewhere ranks wait in a collective first and then in the recovery.
  Patience patience(2 * watch_->stragglers().limit);
  std::map<int, int> before;
  const auto look = [&] {
    const auto owed = debtors(late);
    if (std::exchange(before, owed) != owed)
      patience.restart();  // somebody else has to do it now, and has its own time
    std::set<int> patient;
    for (int rank = 0; rank < group_.size(); ++rank) {
      const bool owes = std::any_of(owed.begin(), owed.end(), [&](const auto& debt) { return debt.second == rank; });
      if (!absent(rank) && !owes) patient.insert(rank);
    }
    const auto place = static_cast<size_t>(std::distance(patient.begin(), patient.find(group_.rank())));
    const bool enough = static_cast<int>(patient.size()) >= watch_->stragglers().min_ranks;
    if (enough && patience.over(turn_to_kill(place))) end_stragglers(owed);
  };
  const auto awaited = [&] { return in_words(debtors(late)); };
  wait_until_then(what, done, Clock::time_point::max(), awaited, look);
}

std::map<int, int> Survivors::debtors(const std::function<bool(int rank)>& late) const {
  std::map<int, int> owed;
  for (int rank = 0; rank < group_.size(); ++rank) {
    if (late(rank)) owed[rank] = absent(rank) ? acting_rank() : rank;
  }
  return owed;
}

void Survivors::end_stragglers(const std::map<int, int>& owed) const {
  for (const auto& [rank, debtor] : owed) {
    if (debtor != group_.rank()) watch_->end(watch_->members()[static_cast<size_t>(in_world(debtor))]);
  }
}

std::string Survivors::in_words(const std::map<int, int>& owed) const {
  std::set<int> ranks;
  for (const auto& [rank, debtor] : owed) ranks.insert(in_world(debtor));
  ranks.erase(in_world(group_.rank()));
  if (ranks.empty()) return "other ranks";
  std::vector<std::string> list;
  for (const int rank : ranks) {
    const auto place = static_cast<size_t>(rank);
    list.push_back(fmt::format("rank {} (pid {}; the launcher's number)", watch_->members()[place],
                               world_->meeting.peers[place].process.pid));
  }
  return fmt::format("{}", fmt::join(list, ", "));
}

bool Survivors::wait_in_time(const std::string& what, const std::function<bool()>& done) const {
  const auto limit = state_of(group_)->progress->timeout_ms.load();
  const auto end = limit > 0 ? Clock::now() + std::chrono::milliseconds(limit) : Clock::time_point::max();
  return wait_until_then(what, done, end, [] { return "other ranks"; });
}

bool Survivors::wait_until_then(const std::string& what, const std::function<bool()>& done, Clock::time_point end,
                                const std::function<std::string()>& awaited, const std::function<void()>& look) const {
  constexpr auto slice = std::chrono::milliseconds(100);
  Patience patience(std::chrono::seconds(world_->options.timeout_seconds), std::chrono::seconds(1));
  while (!shm::wait_until(*world_->memory, shm::cores_suffice(world_->local_size), slice, done)) {
    if (Clock::now() > end) return false;
    if (look) look();
    try {
      if (world_->options.while_waiting) world_->options.while_waiting();
    } catch (const CommError& error) {
      throw JobLost(fmt::format("{}: {}", what, error.what()));
    }
    if (!patience.over()) continue;
    const auto lost = fmt::format("{} has waited {} s for {}, alive, but stopped or not in step()", what,
                                  world_->options.timeout_seconds, awaited());
    if (world_->local_size == world_->placement.size) watch_->give_up(lost);  // else other hosts go on
    throw JobLost(lost);
  }
  return true;
}

std::optional<shm::Place> Survivors::place_of(const void* data, size_t bytes) const {
  return world_->memory->locate(data, bytes);
}

std::byte* Survivors::at(int rank, const shm::Place& place) const {
  return peer(rank).at(place);
}

uint32_t Survivors::arenas() const {
  return world_->memory->arenas();
}

void Survivors::map_all() const {
  for (int rank = 0; rank < group_.size(); ++rank) {
    if (rank == group_.rank()) continue;
    try {
      peer(rank).map_arenas();
    } catch (const std::runtime_error& error) {
      throw CommError(fmt::format("the memory of rank {} cannot be mapped: {}", rank, error.what()));
    }
  }
}

}  // namespace shoal
