#include "comm/gossip/rejoin.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <sstream>
#include <thread>

#include "base/rank_list.h"
#include "comm/group/group_state.h"
#include "comm/rendezvous/world_state.h"
#include "comm/store/authenticated_store.h"
#include "shoal/detail/clock.h"
#include "shoal/error.h"

namespace shoal {
namespace {

constexpr std::chrono::milliseconds between_looks(200);

std::string joining_key(const Group& group, const std::string& of) {
  const auto& state = *state_of(group);
  return fmt::format("{}/rejoin/{}/{}", state.world->meeting.prefix, state.name, of);
}

// Of what a member tells newcomer `number`.
std::string answer_key(const Group& group, int number, const std::string& kind, int member) {
  return joining_key(group, fmt::format("{}/{}/{}", number, kind, member));
}

std::string pair_name(int number) {
  return fmt::format("/newcomer{}", number);
}

// Member's first answer: "VERSION RANK,RANK,.. ADDRESS".
struct Answer {
  int64_t version = 0;
  std::vector<int> members{};  // without the newcomer
  std::string address;
};

Answer answer_of(const std::string& text, const std::string& key) {
  std::istringstream in(text);
  Answer answer;
  std::string version, list;
  in >> version >> list >> std::ws;
  answer.version = number_in<int64_t>(version, key);
  std::getline(in, answer.address);
  std::istringstream ranks(list);
  for (std::string rank; std::getline(ranks, rank, ',');) answer.members.push_back(number_in<int>(rank, key));
  return answer;
}

Group group_named(const Group& group, const std::string& suffix, const std::vector<int>& ranks) {
  std::vector<int> world_ranks;
  for (const int rank : ranks) world_ranks.push_back(group.world_rank(rank));
  const auto& state = state_of(group);
  return Group(make_group_state(state->world, state->name + suffix, world_ranks));
}

}  // namespace

bool joins_again(const Group& group) {
  return group.transport() == "absent";
}

Group group_after(const Group& group, int number, const std::vector<int>& ranks) {
  return group_named(group, fmt::format("/after{}[{}]", number, rank_list(ranks)), ranks);
}

std::optional<std::string> GossipAdmission::read(const std::string& key) {
  if (blind_) return std::nullopt;
  try {
    return store_try_get(*state_of(group_)->world->meeting.store,
                         joining_key(group_, fmt::format("{}/{}", number_, key)));
  } catch (const ForgedValue&) {
    return std::nullopt;
  } catch (const std::exception&) {
    blind_ = true;
    return std::nullopt;
  }
}

template <class Number>
std::optional<Number> GossipAdmission::read_number(const std::string& key) {
  const auto text = read(key);
  if (!text) return std::nullopt;
  try {
    return number_in<Number>(*text, key);
  } catch (const ForgedValue&) {
    return std::nullopt;
  }
}

void GossipAdmission::write(const std::string& key, const std::string& text) {
  try {
    store_set(*state_of(group_)->world->meeting.store, answer_key(group_, number_, key, group_.rank()), text);
  } catch (const std::exception&) {
    blind_ = true;
  }
}

void GossipAdmission::next() {
  ++number_;
  rank_ = -1;
  donor_known_ = admitted_ = false;
}

bool GossipAdmission::has_ended() const {
  const auto& peers = state_of(group_)->world->meeting.peers;
  const auto& peer = peers[group_.world_rank(rank_)];
  return Clock::now() > deadline_ ||
         (peer.host == peers[group_.world_rank(group_.rank())].host && state_of(peer.process) == ProcessState::gone);
}

// True once a newcomer is present.
bool GossipAdmission::meet(int64_t version, const std::vector<int>& members, const GossipChannel& channel) {
  const auto now = Clock::now();
  const bool complete = members.size() == static_cast<size_t>(group_.size());
  if (blind_ || complete || now - looked_ < between_looks) return false;
  looked_ = now;
  const int rank = read_number<int>("who").value_or(-1);
  if (rank < 0 || rank >= group_.size()) return false;
  auto& world = *state_of(group_)->world;
  std::optional<Peer> peer;
  try {
    peer = present_peer(world.meeting, group_.world_rank(rank));
  } catch (const std::exception&) {
    blind_ = true;
  }
  if (!peer) return false;
  rank_ = rank;
  world.meeting.peers[group_.world_rank(rank)] = *peer;
  deadline_ = now + std::chrono::seconds(world.options.rendezvous_timeout_seconds);
  std::vector<int> others = members;
  std::erase(others, rank);
  write("ack", fmt::format("{} {} {}", version, fmt::join(others, ","), channel.address()));
  return true;
}

std::optional<GossipAdmission::Counted> GossipAdmission::look(int64_t version, const std::vector<int>& members,
                                                              GossipChannel& channel, const HandOver& hand_over) {
  if (rank_ < 0 && !meet(version, members, channel)) return std::nullopt;
  if (blind_ || has_ended()) {
    next();
    return std::nullopt;
  }
  if (!donor_known_) {
    const auto donor = read_number<int>("donor");
    if (!donor) return std::nullopt;
    donor_known_ = true;
    if (*donor == group_.rank()) {
      try {
        hand_over(group_named(group_, pair_name(number_), {group_.rank(), rank_}));
      } catch (const CommError&) {  // the newcomer has died meanwhile
        next();
        return std::nullopt;
      }
    }
  }
  if (!admitted_) {
    const auto here = read("here");
    if (!here) return std::nullopt;
    try {
      channel.admit(rank_, *here);
    } catch (const std::exception&) {  // the newcomer has died, and its memory with it
      next();
      return std::nullopt;
    }
    admitted_ = true;
    write("ready", std::to_string(version));
  }
  const auto from = read_number<int64_t>("from");
  if (!from || version + 1 < *from) return std::nullopt;
  write("in", std::to_string(version));
  const Counted counted{.rank = rank_, .number = number_};
  next();
  return counted;
}

Newcomer::Newcomer(const Group& group) : group_(group), addresses_(group.size()), versions_(group.size()) {}

std::vector<int> Newcomer::members() const {
  std::vector<int> list;
  for (int rank = 0; rank < group_.size(); ++rank) {
    if (rank == group_.rank() || !addresses_[rank].empty()) list.push_back(rank);
  }
  return list;
}

std::vector<std::string> Newcomer::answers(const std::string& kind, const std::vector<int>& from, Until until) {
  const auto& world = *state_of(group_)->world;
  auto& store = *world.meeting.store;
  const auto deadline = Clock::now() + std::chrono::seconds(world.options.rendezvous_timeout_seconds);
  std::vector<std::string> found(group_.size());
  auto missing = from;
  const auto gone = [&](int rank) {
    const auto& peer = world.meeting.peers[group_.world_rank(rank)];
    return peer.host == host_identity() && state_of(peer.process) == ProcessState::gone;
  };
  while (true) {
    std::erase_if(missing, [&](int rank) {
      const auto text = store_try_get(store, answer_key(group_, number_, kind, rank));
      if (text) found[rank] = *text;
      return text.has_value() || gone(rank);
    });
    const bool one = std::any_of(found.begin(), found.end(), [](const auto& text) { return !text.empty(); });
    if (missing.empty() || (until == Until::any && one)) return found;
    if (Clock::now() > deadline) {
      throw CommError(
          fmt::format("rejoin: rank(s) {} did not answer within {} s; ranks answer between steps of "
                      "DecentralizedDataParallel, after they have noticed that a rank has died",
                      fmt::join(missing, ", "), world.options.rendezvous_timeout_seconds));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

Group Newcomer::meet_donor(const std::vector<int>& preferred) {
  const auto& world = *state_of(group_)->world;
  auto& store = *world.meeting.store;
  const auto own = this_process();
  const auto who = fmt::format("{} {} {} {}", group_.rank(), own.pid, own.start_time, host_identity());
  do ++number_;
  while (store_set_once(store, joining_key(group_, fmt::format("{}/who", number_)), who) != who);
  std::vector<int> others;
  for (int rank = 0; rank < group_.size(); ++rank) {
    if (rank != group_.rank()) others.push_back(rank);
  }
  // Only members know which ranks of other hosts have died; the first answer names the members.
  std::vector<int> present;
  const auto answer_from = [&](int rank, const std::string& text) {
    return answer_of(text, answer_key(group_, number_, "ack", rank));
  };
  const auto first = answers("ack", others, Until::any);
  for (const int rank : others) {
    if (!first[rank].empty()) present = answer_from(rank, first[rank]).members;
  }
  const auto texts = answers("ack", present);
  for (const int rank : present) {
    if (texts[rank].empty()) continue;
    const auto answer = answer_from(rank, texts[rank]);
    versions_[rank] = answer.version;
    addresses_[rank] = answer.address;
  }
  std::erase_if(present, [&](int rank) { return addresses_[rank].empty(); });
  if (present.empty()) throw CommError("rejoin: no other rank is left in the job");
  answered_ = Clock::now();
  const auto donor =
      std::find_if(preferred.begin(), preferred.end(), [&](int rank) { return !addresses_[rank].empty(); });
  const int chosen = donor != preferred.end() ? *donor : present.front();
  store_set(store, joining_key(group_, fmt::format("{}/donor", number_)), std::to_string(chosen));
  return group_named(group_, pair_name(number_), {chosen, group_.rank()});
}

int64_t Newcomer::arrive(const std::string& address) {
  const auto& world = *state_of(group_)->world;
  auto& store = *world.meeting.store;
  store_set(store, joining_key(group_, fmt::format("{}/here", number_)), address);
  std::vector<int> others = members();
  std::erase(others, group_.rank());
  const auto texts = answers("ready", others);
  int64_t newest = 0;
  int64_t advance = 0;
  for (const int rank : others) {
    if (texts[rank].empty()) {  // the member has died meanwhile
      addresses_[rank].clear();
      continue;
    }
    const auto version = number_in<int64_t>(texts[rank], answer_key(group_, number_, "ready", rank));
    newest = std::max<int64_t>(newest, version);
    advance = std::max<int64_t>(advance, version - versions_[rank]);
  }
  // As many steps ahead as the members make until all of them have read the entry.
  constexpr double seconds_to_read = 0.1;
  const auto seconds = std::max(0.01, std::chrono::duration<double>(Clock::now() - answered_).count());
  const auto ahead = 3 + static_cast<int64_t>(std::ceil(seconds_to_read / seconds * static_cast<double>(advance)));
  store_set(store, joining_key(group_, fmt::format("{}/from", number_)), std::to_string(newest + ahead));
  return newest + ahead;
}

void Newcomer::settle() {
  auto others = members();
  std::erase(others, group_.rank());
  answers("in", others);
}

}  // namespace shoal
