#pragma once
// Gossip channel in memory that the ranks of one host share.

#include "comm/gossip/channel.h"

namespace shoal {

// Collective over the group; nullptr if its ranks do not share memory.
std::unique_ptr<GossipChannel> open_shared_gossip_channel(const Group& group, const std::vector<GossipBuffer>& buffers);

// See join_gossip_channel.
std::unique_ptr<GossipChannel> join_shared_gossip_channel(const Group& group, const std::vector<GossipBuffer>& buffers,
                                                          const std::vector<std::string>& addresses);
// Prefix of the addresses of such channels.
constexpr const char* shared_memory = "memory ";

}  // namespace shoal
