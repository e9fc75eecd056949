#include "comm/membership/membership.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

namespace shoal {
namespace {

using Sights = std::map<int, MemberSight>;

bool contains(const MemberList& members, int member) {
  return std::binary_search(members.begin(), members.end(), member);
}

MemberList common(const MemberList& a, const MemberList& b) {
  MemberList both;
  std::set_intersection(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(both));
  return both;
}

bool is_in(const Sights& others, int member, MemberSight::State state) {
  const auto found = others.find(member);
  return found != others.end() && found->second.state == state;
}

// The card of another member that is neither gone nor silent.
const MemberCard* card_of(const Sights& others, int member) {
  const auto found = others.find(member);
  if (found == others.end() || found->second.state != MemberSight::State::present) return nullptr;
  return found->second.card ? &*found->second.card : nullptr;
}

// Whether a member will not go on: it has ended, or it knows that it was left out. An empty card from before the last
// admission is that of a newcomer which has not seen the admission yet.
bool has_left(const Sights& others, int member, uint64_t grown) {
  const auto found = others.find(member);
  if (found == others.end()) return false;
  const auto& [state, card] = found->second;
  return state == MemberSight::State::gone || (card && card->members.empty() && card->number >= grown);
}

// Whether a member that has ended may have gone on without this process, and have admitted others, before it ended: its
// last card lacks this process, and no living member on that card goes on with this process. One that shows an older
// card may have decided for that of the dead one. A card from before the last admission lacks the newcomers only
// because it did not know them.
bool ended_without(const Sights& others, int member, int self, uint64_t grown) {
  const auto found = others.find(member);
  if (found == others.end() || found->second.state != MemberSight::State::gone || !found->second.card) return false;
  const auto& last = *found->second.card;
  if (last.members.empty() || last.grown < grown || contains(last.members, self)) return false;
  return std::none_of(last.members.begin(), last.members.end(), [&](int other) {
    const auto* shown = card_of(others, other);
    return shown != nullptr && shown->number >= last.number && contains(shown->members, self);
  });
}

uint64_t highest_number(const Sights& others) {
  uint64_t highest = 0;
  for (const auto& [member, sight] : others) {
    if (sight.card) highest = std::max(highest, sight.card->number);
  }
  return highest;
}

}  // namespace

Membership::Membership(int self, MemberCard first)
    : self_(self), card_(std::move(first)), base_(card_.members), grown_(card_.members) {}

Membership::Outcome Membership::look(const Sights& others) {
  if (card_.members.empty()) return join(others);
  auto latest = card_;
  // Newcomers that a member has admitted meanwhile.
  for (const int member : card_.members) {
    const auto* shown = card_of(others, member);
    if (shown != nullptr && shown->grown > latest.grown && contains(shown->members, self_)) latest = *shown;
  }
  if (latest.grown > card_.grown) adopt(latest);
  auto members = latest.members;
  std::erase_if(members, [&](int member) { return has_left(others, member, latest.grown); });
  auto without_silent = members;
  std::erase_if(without_silent, [&](int member) { return is_in(others, member, MemberSight::State::silent); });
  const bool stuck = !has_majority(without_silent, others);
  // A newcomer has nothing to go on with, so it does not leave out members that have.
  if (!stuck && contains(base_, self_)) members = std::move(without_silent);
  for (const int member : latest.members) {
    if (member == self_) continue;
    // A list that is shorter than this one tells of members that are gone. One from before the last admission is short
    // because it does not have the newcomers yet.
    const auto* shown = card_of(others, member);
    if (shown == nullptr || shown->members.empty() || shown->number < latest.grown) continue;
    if (!contains(shown->members, self_)) {
      card_ = {.number = std::max(card_.number, shown->number)};
      return Outcome::left_out;
    }
    members = common(members, shown->members);
  }
  // A newcomer without any member that has the job's state asks again.
  if (!contains(base_, self_) && common(members, base_).empty()) {
    card_ = {.number = std::max(card_.number, highest_number(others))};
    return Outcome::left_out;
  }
  if (members != latest.members) {
    const auto number = std::max(card_.number, highest_number(others)) + 1;
    card_ = {number, latest.grown, std::move(members), std::move(latest.base)};
    return Outcome::waiting;
  }
  card_ = std::move(latest);
  for (const int member : card_.members) {
    const auto* shown = card_of(others, member);
    if (shown != nullptr) card_.number = std::max(card_.number, shown->number);
  }
  const bool same = std::all_of(card_.members.begin(), card_.members.end(), [&](int member) {
    if (member == self_) return true;
    const auto* shown = card_of(others, member);
    return shown != nullptr && shown->number == card_.number && shown->members == card_.members;
  });
  if (!has_majority(card_.members, others)) return Outcome::no_majority;
  if (!same) return stuck ? Outcome::no_majority : Outcome::waiting;
  base_ = grown_ = card_.members;
  return Outcome::agreed;
}

void Membership::renew(const Sights& others) {
  card_.number = std::max(card_.number, highest_number(others)) + 1;
}

void Membership::admit(const MemberList& newcomers, const Sights& others) {
  card_.number = std::max(card_.number, highest_number(others)) + 1;
  card_.grown = card_.number;
  card_.base = card_.members;
  card_.members.insert(card_.members.end(), newcomers.begin(), newcomers.end());
  std::sort(card_.members.begin(), card_.members.end());
  adopt(card_);
}

void Membership::adopt(const MemberCard& grown) {
  card_.grown = grown.grown;
  base_ = grown.base;
  grown_ = grown.members;
}

// Members that are left out without proof of their end might form a generation of their own, unless this one has more
// than half of the members, or half of them with the first one. A member that ended after it had gone on without this
// process still counts: whoever it has admitted may be at work.
bool Membership::has_majority(const MemberList& members, const Sights& others) const {
  const std::array lists{&base_, &grown_};
  return std::all_of(lists.begin(), lists.end(), [&](const MemberList* list) {
    MemberList living;
    std::copy_if(list->begin(), list->end(), std::back_inserter(living), [&](int member) {
      return !has_left(others, member, card_.grown) || ended_without(others, member, self_, card_.grown);
    });
    const auto here = common(living, members);
    if (2 * here.size() != living.size()) return 2 * here.size() > living.size();
    return here.empty() || here.front() == living.front();
  });
}

Membership::Outcome Membership::join(const Sights& others) {
  for (const auto& [member, sight] : others) {
    const auto* shown = card_of(others, member);
    if (shown == nullptr || !contains(shown->members, self_) || shown->grown <= card_.number) continue;
    card_ = *shown;
    adopt(card_);
  }
  return Outcome::waiting;
}

}  // namespace shoal
