#pragma once
// State of a ShardGossipOptimizer.

#include <optional>
#include <vector>

#include "shoal/shard_gossip.h"
#include "strategy/decentralized/averaging.h"

namespace shoal {

struct ShardGossipOptimizerCore::Gossip {
  Gossip(const Group& group, const ShardGossipOptions& options)
      : across(group),
        overlap(options.overlap),
        mixing(group, options.topology ? *options.topology : make_topology("one-peer-exp", group.size()),
               options.neighbour_timeout_seconds) {}

  Group across;
  bool overlap;
  Mixing mixing;
  std::vector<GossipBucket> buckets{};
  std::vector<at::Tensor> own{};  // this host's values, by bucket, while parameters hold the hosts' mean
  bool left = false;
  std::optional<Group> remaining{};  // of all ranks, when `hosts_gone` hosts had gone
  size_t hosts_gone = 0;
};

}  // namespace shoal
