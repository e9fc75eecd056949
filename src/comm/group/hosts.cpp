#include "comm/group/hosts.h"

#include <map>
#include <string>

#include "comm/group/group_state.h"
#include "comm/rendezvous/world_state.h"

namespace shoal {

std::vector<int> hosts_of(const Group& group) {
  std::map<std::string, int> numbers;
  std::vector<int> hosts;
  for (int rank = 0; rank < group.size(); ++rank) {
    const auto& host = state_of(group)->world->meeting.peers[group.world_rank(rank)].host;
    hosts.push_back(numbers.try_emplace(host, static_cast<int>(numbers.size())).first->second);
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
