// Admission of processes that come to an elastic job.

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "comm/group/group_state.h"
#include "comm/membership/generations.h"
#include "comm/membership/join_board.h"
#include "comm/membership/store_table.h"
#include "comm/rendezvous/world_state.h"
#include "shoal/detail/clock.h"
#include "shoal/error.h"

namespace shoal {

namespace {

constexpr std::chrono::seconds word_of_a_death(1);  // how long one of another host takes

}  // namespace

Generations::Knock::Knock(const WorldState& state) {
  if (!state.join.number) return;
  table = state.join.table;
  table->knock(*state.join.number, state.meeting.peers.front());
  number = state.join.number;
}

Generations::Knock::~Knock() {
  if (!number) return;
  try {
    table->withdraw(*number);
  } catch (const CommError&) {  // NOLINT(bugprone-empty-catch): of a lost store, in which nobody reads of it
  }
}

bool Generations::is_newcomer() const {
  return !std::binary_search(complete_.begin(), complete_.end(), self());
}

MemberList Generations::newcomers_of(const MemberList& members) const {
  MemberList list;
  std::set_difference(members.begin(), members.end(), complete_.begin(), complete_.end(), std::back_inserter(list));
  return list;
}

MemberList Generations::suspects_of(const MemberList& members) const {
  auto list = newcomers_of(members);
  std::set_intersection(members.begin(), members.end(), trial_.begin(), trial_.end(), std::back_inserter(list));
  std::sort(list.begin(), list.end());
  return list;
}

bool Generations::is_on_trial() const {
  return std::binary_search(trial_.begin(), trial_.end(), self());
}

MemberList Generations::have_come() const {
  MemberList list;
  const auto come = [&](int member) { return joins_ && member >= joins_->first_ranks(); };
  std::copy_if(members().begin(), members().end(), std::back_inserter(list), come);
  return list;
}

// What newcomers look for, once all members are there.
void Generations::announce_job() {
  if (auto* table = dynamic_cast<JoinBoard*>(joins_.get())) table->enter(self(), peers_[static_cast<size_t>(self())]);
  if (auto* table = dynamic_cast<StoreTable*>(joins_.get()); table != nullptr && self() == 0) table->announce();
}

bool Generations::names_a_stranger(const std::map<int, MemberSight>& sights) const {
  return std::any_of(sights.begin(), sights.end(), [&](const auto& sight) {
    const auto& card = sight.second.card;
    return card && std::any_of(card->members.begin(), card->members.end(), [&](int member) {
             return member >= static_cast<int>(peers_.size()) || peers_[static_cast<size_t>(member)].process.pid == 0;
           });
  });
}

// Looks again if a process has come meanwhile, whose number a card may have.
std::map<int, MemberSight> Generations::look() {
  std::map<int, MemberSight> sights;
  do {
    learn_of_newcomers();
    sights = board_->look();
    if (joins_ && names_a_stranger(sights)) joins_->refresh();  // the table is older than the card
  } while (joins_ && joins_->changes() != changes_);
  for (auto& [member, sight] : sights) {
    // Whoever drops one says so in the table, so that all go on without it.
    const bool refused = joins_ && member >= joins_->first_ranks() && joins_->is_refused(member);
    if (refused || dropped_.contains(member)) sight.state = MemberSight::State::gone;
  }
  return sights;
}

void Generations::learn_of_newcomers() {
  if (!joins_ || joins_->changes() == changes_) return;
  changes_ = joins_->changes();
  auto peers = joins_->peers();
  const auto known = std::min(peers.size(), peers_.size());
  for (size_t member = 0; member < known; ++member) {
    if (peers_[member].process.pid != 0) peers[member] = peers_[member];
  }
  if (peers.size() < peers_.size())
    peers.insert(peers.end(), peers_.begin() + static_cast<int64_t>(known), peers_.end());
  peers_ = std::move(peers);
  // Another one, because threads that wait in the present generation read the former one.
  board_ = std::make_shared<Board>(cell_->state->memory, self(), peers_, board_.get());
}

void Generations::refuse(const MemberList& newcomers, const std::string& why) {
  for (const int member : newcomers) {
    dropped_.insert(member);
    if (joins_) joins_->refuse(member, why);
  }
}

// The failure may come of a death of which the kernel's report has not arrived yet, or the word of another host.
bool Generations::explained_by_a_death() const {
  const auto& now = members();
  const bool death = std::any_of(now.begin(), now.end(), [&](int member) {
    return member != self() && is_on_this_host(member) && state_of(board_->process(member)) == ProcessState::gone;
  });
  if (death || !has_several_hosts()) return death;
  const auto end = Clock::now() + word_of_a_death;
  while (!broken() && Clock::now() < end) board_->wait(board_->bell());
  return broken();
}

bool Generations::drop_newcomers(const std::string& why) {
  if (explained_by_a_death()) return true;
  const auto suspects = suspects_of(members());
  if (is_newcomer() || is_on_trial() || suspects.empty()) return false;
  refuse(suspects, why);
  return true;
}

void Generations::drop_late(const MemberCard& card) {
  if (is_newcomer() || is_on_trial()) return;
  for (const int member : suspects_of(card.members)) {
    if (!(board_->entry(member).card == card)) refuse({member}, "it did not answer: was it stopped?");
  }
}

bool Generations::admit(int most_ranks, const std::string& why_one_host, const std::string& changed) {
  MemberList admitted;
  const auto group = cell_->group;
  if (joins_ && group.rank() == 0) {
    joins_->refresh();
    learn_of_newcomers();
    for (const int member : joins_->knocking()) {
      if (dropped_.contains(member)) continue;
      const bool reached = board_->knows(member) && !board_->gone(member) && !board_->silent(member);
      const int ranks = group.size() + static_cast<int>(admitted.size());
      if (!reached) {
        refuse({member}, "its memory cannot be opened, nothing is heard of its host, or it has ended");
      } else if (!changed.empty()) {
        refuse({member}, "the job has changed since it said what newcomers must be: " + changed);
      } else if (!why_one_host.empty() && !is_on_this_host(member)) {
        refuse({member},
               fmt::format("it is on another host than the job's ranks, and {}; or start it on theirs", why_one_host));
      } else if (ranks >= joins_->most_ranks()) {
        refuse({member}, fmt::format("the job has {} ranks, the most that --elastic allows", ranks));
      } else if (ranks >= most_ranks) {
        refuse({member}, fmt::format("its global batch is kept in {0} slices, so it has at most {0} ranks: give "
                                     "ElasticOptions::batch_slices more",
                                     most_ranks));
      } else if (joins_->claim(member)) {
        admitted.push_back(member);
      }
    }
  }
  // Behind this, all members have come to the same place between two steps, and see the entries of those that come.
  try {
    const auto most = group.all_reduce(std::vector<double>{static_cast<double>(admitted.size())}, ReduceOp::max);
    if (most[0] == 0) return false;
  } catch (const CommError&) {
    for (const int member : admitted) joins_->release(member);
    throw;
  }
  if (group.rank() != 0) {
    wait_for_the_first();
    return true;
  }
  give_up(*cell_->state);  // before the card says so
  membership_.admit(admitted, look());
  board_->show(membership_.card());
  return true;
}

// Its card says who comes. If it ends, the others recover without newcomers.
void Generations::wait_for_the_first() const {
  const auto deadline = Clock::now() + std::chrono::seconds(cell_->state->options.timeout_seconds);
  Patience patience(stragglers_.limit);
  while (true) {
    const auto seen = board_->bell();
    if (watch_->raised() || Clock::now() > deadline || patience.over()) return;
    board_->wait(seen);
  }
}

void Generations::complete(MemberList on_trial) {
  complete_ = members();
  trial_ = std::move(on_trial);
  cell_->state->liveness->wait_for_stopped();
  if (knock_.number) joins_->admitted(*std::exchange(knock_.number, std::nullopt));
}

// A card without members says that this process knows that it is left out.
void Generations::resign() {
  if (knock_.number) {
    const bool claimed = !joins_->withdraw(*std::exchange(knock_.number, std::nullopt));
    const auto limit = Clock::now() + std::chrono::seconds(2);
    while (claimed && membership_.card().members.empty() && Clock::now() < limit) {
      membership_.look(look());
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  } else if (joins_ && self() >= joins_->first_ranks()) {
    joins_->withdraw(self());
  }
  if (membership_.card().members.empty()) return;
  auto latest = membership_.card().number;
  for (const auto& [member, sight] : board_->look()) latest = std::max(latest, sight.card ? sight.card->number : 0);
  board_->show({.number = latest + 1});
}

void Generations::require_not_refused() const {
  if (!joins_ || self() < joins_->first_ranks() || !joins_->is_refused(self())) return;
  throw UsageError("the job has refused this newcomer: " + joins_->refusal(self()));
}

void Generations::require_job() const {
  require_not_refused();
  const auto closed = joins_->why_closed();
  if (!closed.empty()) throw UsageError("ranks cannot join this job: " + closed);
  for (int member = 0; member < static_cast<int>(peers_.size()); ++member) {
    if (member != self() && joins_->is_member(member) && !board_->gone(member) && !board_->entry(member).left) return;
  }
  throw UsageError("the job that this process was to join has ended");
}

}  // namespace shoal
