#include "comm/agreement/mutual_wait.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <sstream>

#include "base/printable.h"
#include "comm/agreement/disagreement.h"
#include "comm/rendezvous/world_state.h"

namespace shoal {
namespace {

constexpr size_t most_peers = 64;  // peers whose posts one rank reads

// Post of a waiting rank, in the store as lines of text.
struct Post {
  int rank = -1;
  std::string group{};
  uint64_t number = 0;
  std::string operation{};
  bool one_thread = true;                     // one thread makes all of the rank's collectives
  std::map<std::string, uint64_t> entered{};  // by group

  std::string in_words() const {
    return fmt::format("rank {} waits in group '{}' for #{} {}", rank, group, number, operation);
  }
  bool has_entered(const std::string& name, uint64_t which) const {
    const auto found = entered.find(name);
    return found != entered.end() && found->second > which;
  }
};

std::string key_of(const WorldState& world, int rank) {
  return fmt::format("{}/waits/{}", world.meeting.prefix, rank);
}

std::string text_of(const Post& post) {
  auto text = fmt::format("{}\n{}\n{}\n{}\n", post.group, post.number, post.operation, post.one_thread ? 1 : 0);
  for (const auto& [name, count] : post.entered) text += fmt::format("{}\t{}\n", count, name);
  return text;
}

std::optional<Post> read_post(const WorldState& world, int rank) {
  const auto text = store_try_get(*world.meeting.store, key_of(world, rank));
  if (!text || text->empty()) return std::nullopt;
  std::istringstream lines(*text);
  Post post{.rank = rank};
  std::string line;
  std::getline(lines, post.group);
  std::getline(lines, line);
  post.number = std::stoull(line);
  std::getline(lines, line);
  post.operation = printable(line);
  std::getline(lines, line);
  post.one_thread = line == "1";
  while (std::getline(lines, line)) {
    const auto tab = line.find('\t');
    post.entered[line.substr(tab + 1)] = std::stoull(line.substr(0, tab));
  }
  return post;
}

Post own_post(const GroupState& group, const Call& call, uint64_t number) {
  return {.rank = group.world->placement.rank,
          .group = group.name,
          .number = number,
          .operation = printable(call.describe()),
          .one_thread = !group.world->activity.several_threads(),
          .entered = group.world->activity.entered()};
}

}  // namespace

void MutualWait::post() const {
  const auto own = own_post(group_, call_, number_);
  store_set(*group_.world->meeting.store, key_of(*group_.world, own.rank), text_of(own));
}

void MutualWait::withdraw() const {
  store_set(*group_.world->meeting.store, key_of(*group_.world, group_.world->placement.rank), "");
}

std::optional<std::string> MutualWait::look() const {
  const auto& world = *group_.world;
  if (group_.world_ranks.size() > most_peers) return std::nullopt;
  const auto own = own_post(group_, call_, number_);
  std::vector<Post> posts;
  for (const int rank : group_.world_ranks) {
    auto post = rank == own.rank ? own : read_post(world, rank).value_or(Post());
    if (post.rank >= 0) posts.push_back(std::move(post));
  }
  const auto lowest_in = [&](const std::string& group) {
    return std::find_if(posts.begin(), posts.end(), [&](const Post& post) { return post.group == group; });
  };
  for (const auto& peer : posts) {
    if (peer.group == own.group || own.entered.count(peer.group) == 0) continue;
    if (own.has_entered(peer.group, peer.number)) {
      if (auto difference = Disagreement::look(world, peer.group, peer.rank)) return difference;
      continue;
    }
    if (!own.one_thread || !peer.one_thread || peer.has_entered(own.group, own.number)) continue;
    const auto here = lowest_in(own.group), there = lowest_in(peer.group);
    const auto& [first, second] = here->rank < there->rank ? std::pair(*here, *there) : std::pair(*there, *here);
    return Disagreement::tell(
        world, peer.group,
        fmt::format("ranks wait for each other in different groups: {}, {}; call the operations of both groups in one "
                    "order",
                    first.in_words(), second.in_words()));
  }
  return std::nullopt;
}

}  // namespace shoal
