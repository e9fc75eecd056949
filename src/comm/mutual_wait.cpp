#include "comm/mutual_wait.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <sstream>

#include "base/printable.h"
#include "comm/world_state.h"

namespace shoal {
namespace {

constexpr auto patience = std::chrono::milliseconds(500);
constexpr auto rarely = std::chrono::seconds(5);
constexpr size_t most_peers = 64;  // whose posts one rank reads

// Where a rank waits, as it lies in the store: lines of text.
struct Post {
  int rank = -1;
  std::string group{};
  uint64_t number = 0;
  std::string operation{};
  std::map<std::string, uint64_t> entered{};  // by group

  std::string in_words() const {
    return fmt::format("rank {} waits in group '{}' for #{} {}", rank, group, number, operation);
  }
};

std::string key_of(const WorldState& world, int rank) {
  return fmt::format("{}/waits/{}", world.meeting.prefix, rank);
}

std::optional<Post> read_post(const WorldState& world, int rank) {
  const auto text = store_try_get(*world.meeting.store, key_of(world, rank));
  if (!text) return std::nullopt;
  std::istringstream lines(*text);
  Post post{.rank = rank};
  std::string line;
  std::getline(lines, post.group);
  std::getline(lines, line);
  post.number = std::stoull(line);
  std::getline(lines, line);
  post.operation = printable(line);
  while (std::getline(lines, line)) {
    const auto tab = line.find('\t');
    post.entered[line.substr(tab + 1)] = std::stoull(line.substr(0, tab));
  }
  return post;
}

uint64_t entered_of(const std::map<std::string, uint64_t>& entered, const std::string& group) {
  const auto found = entered.find(group);
  return found == entered.end() ? 0 : found->second;
}

}  // namespace

MutualWait::MutualWait(const GroupState& group, const Call& call, uint64_t number)
    : group_(group), call_(call), number_(number), next_(Clock::now() + patience) {}

void MutualWait::post() const {
  auto text = fmt::format("{}\n{}\n{}\n", group_.name, number_, call_.describe());
  for (const auto& [name, count] : group_.world->activity.entered()) text += fmt::format("{}\t{}\n", count, name);
  store_set(*group_.world->meeting.store, key_of(*group_.world, group_.world->placement.rank), text);
}

std::optional<std::string> MutualWait::look() {
  const auto& world = *group_.world;
  if (Clock::now() < next_ || !world.meeting.store || group_.world_ranks.size() > most_peers) return std::nullopt;
  if (world.activity.several_threads()) return std::nullopt;
  try {
    if (!posted_) {
      post();
      posted_ = true;
      next_ = Clock::now() + patience;
      return std::nullopt;
    }
    next_ = Clock::now() + (next_ + patience < Clock::now() ? Clock::duration(rarely) : Clock::duration(patience));
    const auto own_rank = world.placement.rank;
    const Post own{own_rank, group_.name, number_, call_.describe(), world.activity.entered()};
    std::vector<Post> posts;
    for (const int rank : group_.world_ranks) {
      auto post = rank == own_rank ? own : read_post(world, rank).value_or(Post());
      if (post.rank >= 0) posts.push_back(std::move(post));
    }
    const auto lowest_in = [&](const std::string& group) {
      return std::find_if(posts.begin(), posts.end(), [&](const Post& post) { return post.group == group; });
    };
    for (const auto& peer : posts) {
      // A wait that is over has been entered by all, this rank too: an old post says nothing wrong.
      const bool needs_me = own.entered.count(peer.group) > 0 && entered_of(own.entered, peer.group) <= peer.number;
      if (peer.group == own.group || !needs_me || entered_of(peer.entered, own.group) > own.number) continue;
      const auto here = lowest_in(own.group), there = lowest_in(peer.group);
      const auto& [first, second] = here->rank < there->rank ? std::pair(*here, *there) : std::pair(*there, *here);
      return fmt::format(
          "ranks wait for each other in different groups: {}, {}; call the operations of both groups in one order",
          first.in_words(), second.in_words());
    }
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): without a store the deadline says it
  }
  return std::nullopt;
}

}  // namespace shoal
