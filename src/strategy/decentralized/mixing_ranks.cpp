// Ranks that mix: those that end, stop, and come back.

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <utility>

#include "base/print_to_stderr.h"
#include "base/rank_list.h"
#include "strategy/decentralized/mixing.h"

namespace shoal {

Mixing::Party Mixing::party_of(std::vector<int> members) const {
  std::vector<int> absent;
  for (int rank = 0; rank < group_.size(); ++rank) {
    if (std::count(members.begin(), members.end(), rank) == 0) absent.push_back(rank);
  }
  const auto own = std::find(members.begin(), members.end(), group_.rank());
  const auto number = static_cast<int>(own - members.begin());
  return {
      .members = std::move(members), .topology = absent.empty() ? whole_ : whole_.without(absent), .number = number};
}

Group Mixing::meet_donor() {
  std::vector<int> neighbours;
  for (int64_t index = 0; index < whole_.period(); ++index) {
    for (const auto& source : whole_.round(index).sources(group_.rank())) neighbours.push_back(source.rank);
  }
  return newcomer_->meet_donor(neighbours);
}

int64_t Mixing::arrive(std::vector<double> mass) {
  version_ = newcomer_->arrive(channel_->address()) - 1;
  mass_ = std::move(mass);
  now_ = party_of(newcomer_->members());
  for (auto& copies : copies_) copies.start_afresh(topology().period());
  last_newcomer_ = newcomer_->number();
  admission_ = GossipAdmission(group_, last_newcomer_);
  return version_;
}

void Mixing::settle() {
  newcomer_->settle();
  newcomer_.reset();
}

void Mixing::begin_step() {
  if (!channel_) return;
  if (next_) {
    now_ = *std::exchange(next_, std::nullopt);
    for (auto& copies : copies_) copies.start_afresh(topology().period());
  }
  remove_lost();
  if (hand_over_) count_in();
}

void Mixing::remove_lost(const std::vector<int>& also) {
  if (!channel_) return;
  auto left = now_.members;
  std::erase_if(left, [&](int rank) {
    const bool named = std::count(also.begin(), also.end(), rank) > 0;
    return rank != group_.rank() && (named || channel_->gone(rank, version_));
  });
  if (left.size() == now_.members.size()) return;
  std::vector<int> removed;
  std::set_difference(now_.members.begin(), now_.members.end(), left.begin(), left.end(), std::back_inserter(removed));
  statistics_.removed.insert(statistics_.removed.end(), removed.begin(), removed.end());
  tell_of_lost(removed);
  now_ = party_of(std::move(left));
  remaining_.reset();
  for (auto& copies : copies_) copies.start_afresh(topology().period());
  channel_->forget();  // the ranks that read this one have changed
}

// Of those that have not left by themselves: if they live after all, they train apart from this rank.
void Mixing::tell_of_lost(std::vector<int> removed) const {
  std::erase_if(removed, [&](int rank) { return !channel_->lost(rank); });
  if (removed.empty()) return;
  for (int& rank : removed) rank = group_.world_rank(rank);
  print_to_stderr(
      "shoal: rank {} goes on without rank(s) {}: they have ended without leave(), or their hosts do not answer\n",
      group_.world_rank(group_.rank()), rank_list(removed));
}

void Mixing::remove_ended() {
  if (!channel_) return;
  constexpr auto never = std::numeric_limits<int64_t>::max();
  std::vector<int> ended;
  for (const int rank : now_.members) {
    if (rank != group_.rank() && channel_->gone(rank, never)) ended.push_back(rank);
  }
  remove_lost(ended);
}

void Mixing::count_in() {
  const auto counted = admission_.look(version_, now_.members, *channel_, hand_over_);
  if (!counted) return;
  auto members = now_.members;
  members.push_back(counted->rank);
  std::sort(members.begin(), members.end());
  members.erase(std::unique(members.begin(), members.end()), members.end());
  next_ = party_of(std::move(members));
  for (auto& copies : copies_) copies.forget(counted->rank);
  last_newcomer_ = counted->number;
  std::erase(statistics_.removed, counted->rank);
  statistics_.rejoined.push_back(counted->rank);
  remaining_.reset();
}

void Mixing::restart(int64_t version) {
  version_ = version;
  channel_->start_afresh(version);
}

void Mixing::stop(uint32_t reason) {
  if (channel_) channel_->stop(version_, reason);
}

std::optional<std::pair<int, uint32_t>> Mixing::stopped_before(int64_t version) const {
  for (const int rank : now_.members) {
    const auto stop = channel_ && rank != group_.rank() ? channel_->stopped(rank) : std::nullopt;
    if (stop && stop->version < version) return std::pair(rank, stop->reason);
  }
  return std::nullopt;
}

const Group& Mixing::remaining() {
  const auto& members = next_ ? next_->members : now_.members;
  if (last_newcomer_ == 0 && members.size() == static_cast<size_t>(group_.size())) return group_;
  if (!remaining_) {
    const auto is_lost = [&](int rank) { return channel_ && channel_->lost(rank); };
    if (members.size() == 1 && std::any_of(statistics_.removed.begin(), statistics_.removed.end(), is_lost)) {
      print_to_stderr(
          "shoal: rank {} has lost the other ranks, so global_avg(), consensus_distance() and checkpoints are of this "
          "rank's values alone\n",
          group_.world_rank(group_.rank()));
    }
    remaining_ = last_newcomer_ == 0 ? group_.subgroup(members) : group_after(group_, last_newcomer_, members);
  }
  return *remaining_;
}

void Mixing::count_from(const ExchangeStatistics& former) {
  statistics_ = former;
  statistics_.removed.clear();  // these are ranks of the other one's group
  statistics_.rejoined.clear();
}

void Mixing::leave() {
  if (channel_) channel_->leave();
}

}  // namespace shoal
