#pragma once
// A gossip channel between hosts: one TCP connection per direction of each pair of ranks that have exchanged something.

#include "comm/gossip/channel.h"

namespace shoal {

// Collective over the group. Listens on the address that the group's other sockets listen on.
std::unique_ptr<GossipChannel> open_socket_gossip_channel(const Group& group, const std::vector<GossipBuffer>& buffers);

// See join_gossip_channel.
std::unique_ptr<GossipChannel> join_socket_gossip_channel(const Group& group, const std::vector<GossipBuffer>& buffers,
                                                          const std::vector<std::string>& addresses);

}  // namespace shoal
