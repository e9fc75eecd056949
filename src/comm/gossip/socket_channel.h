#pragma once
// Gossip channel over TCP: one connection per direction for each pair of ranks that have exchanged something.

#include "comm/gossip/channel.h"

namespace shoal {

// Collective over the group. Listens on the same address as the group's other sockets.
std::unique_ptr<GossipChannel> open_socket_gossip_channel(const Group& group, const std::vector<GossipBuffer>& buffers);

// See join_gossip_channel.
std::unique_ptr<GossipChannel> join_socket_gossip_channel(const Group& group, const std::vector<GossipBuffer>& buffers,
                                                          const std::vector<std::string>& addresses);

}  // namespace shoal
