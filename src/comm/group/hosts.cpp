#include "comm/group/hosts.h"

#include <algorithm>
#include <string>

#include "comm/group/group_state.h"
#include "comm/rendezvous/world_state.h"

namespace shoal {

namespace {

const std::string& host_of(const Group& group, int rank) {
  return state_of(group)->world->meeting.peers[static_cast<size_t>(group.world_rank(rank))].host;
}

}  // namespace

std::vector<std::string> names_of_hosts(const Group& group) {
  std::vector<std::string> names;
  for (int rank = 0; rank < group.size(); ++rank) {
    const auto& host = host_of(group, rank);
    if (std::find(names.begin(), names.end(), host) == names.end()) names.push_back(host);
  }
  return names;
}

std::vector<int> hosts_of(const Group& group) {
  const auto names = names_of_hosts(group);
  std::vector<int> hosts;
  for (int rank = 0; rank < group.size(); ++rank) {
    const auto found = std::find(names.begin(), names.end(), host_of(group, rank));
    hosts.push_back(static_cast<int>(found - names.begin()));
  }
  return hosts;
}

std::vector<int> world_ranks(const Group& group) {
  std::vector<int> ranks;
  for (int rank = 0; rank < group.size(); ++rank) ranks.push_back(group.world_rank(rank));
  return ranks;
}

bool is_by_host(const Group& group) {
  return state_of(group)->by_host;
}

}  // namespace shoal
