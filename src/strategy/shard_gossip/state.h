#pragma once
// State of a ShardGossipOptimizer.

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/elastic/guarded_update.h"
#include "engine/elastic/saved_values.h"
#include "shoal/shard_gossip.h"
#include "strategy/decentralized/averaging.h"

namespace shoal {

struct ShardGossipOptimizerCore::Gossip {
  Gossip(const Group& inside, const Group& group, const ShardGossipOptions& chosen)
      : across(group),
        options(chosen),
        topology(chosen.topology ? *chosen.topology : make_topology("one-peer-exp", group.size())),
        sizes(static_cast<size_t>(group.size()), inside.size()),
        mixing(std::make_unique<Mixing>(group, topology, chosen.neighbour_timeout_seconds)) {}

  // Divides the module's shards into buckets, and opens them to the other hosts. Collective over `across`.
  void open(ShardedModule& module);
  // Shows all buckets as the present version. Not before open().
  void show();

  Group across;
  ShardGossipOptions options;
  Topology topology;       // of the hosts at the start
  std::vector<int> sizes;  // of the hosts, in ranks
  std::unique_ptr<Mixing> mixing;
  std::vector<GossipBucket> buckets{};
  bool holds_mean = false;        // parameters hold the hosts' mean
  std::vector<at::Tensor> own{};  // this host's values, by bucket, meanwhile
  bool left = false;
  std::vector<int> gone{};           // hosts, as the ranks of this one have agreed
  std::optional<Group> remaining{};  // of all ranks, when `hosts_gone` hosts had gone
  size_t hosts_gone = 0;
  // In an elastic job.
  std::vector<std::string> names{};       // of the hosts at its start
  std::vector<std::vector<int>> ranks{};  // by host, after a change: world ranks
  std::unique_ptr<SavedValues> saved{};   // in place of `own`
  std::optional<int64_t> version{};       // shown last, while the ranks change
  std::vector<at::Tensor> gathered{};     // by bucket: what a step mixes in, where the ranks of this host can read it
  GossipTerms mixed_in{};                 // the same by what this rank updates
  std::optional<int64_t> mixed_at{};      // version for which it was gathered
};

}  // namespace shoal
