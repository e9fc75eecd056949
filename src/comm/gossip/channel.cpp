#include "comm/gossip/channel.h"

#include "comm/gossip/shared_channel.h"
#include "comm/gossip/socket_channel.h"

namespace shoal {

std::unique_ptr<GossipChannel> open_gossip_channel(const Group& group, const std::vector<GossipBuffer>& buffers) {
  if (group.transport() == "host" || group.size() == 1) {
    if (auto channel = open_shared_gossip_channel(group, buffers)) return channel;
  }
  return open_socket_gossip_channel(group, buffers);
}

}  // namespace shoal
