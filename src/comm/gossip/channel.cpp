#include "comm/gossip/channel.h"

#include <algorithm>

#include "comm/gossip/shared_channel.h"
#include "comm/gossip/socket_channel.h"

namespace shoal {

std::unique_ptr<GossipChannel> open_gossip_channel(const Group& group, const std::vector<GossipBuffer>& buffers) {
  if (group.transport() == "host" || group.size() == 1) {
    if (auto channel = open_shared_gossip_channel(group, buffers)) return channel;
  }
  return open_socket_gossip_channel(group, buffers);
}

std::unique_ptr<GossipChannel> join_gossip_channel(const Group& group, const std::vector<GossipBuffer>& buffers,
                                                   const std::vector<std::string>& addresses) {
  const bool shared = std::any_of(addresses.begin(), addresses.end(),
                                  [](const std::string& address) { return address.starts_with(shared_memory); });
  return (shared ? join_shared_gossip_channel : join_socket_gossip_channel)(group, buffers, addresses);
}

}  // namespace shoal
