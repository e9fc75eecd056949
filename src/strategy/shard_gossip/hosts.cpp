// Hosts, as groups of ranks: their groups, and those that have gone.

#include <algorithm>
#include <set>

#include "comm/agreement/fail_together.h"
#include "comm/group/hosts.h"
#include "comm/group/rank_groups.h"
#include "engine/sharded/sharded_ranges.h"
#include "shoal/group.h"
#include "strategy/shard_gossip/state.h"

namespace shoal {

HostGroups host_groups(const Group& group, std::optional<int> size) {
  agree(group, "the ranks of a host", {size ? std::to_string(*size) : "where they run"});
  const auto place = hybrid_ranks(rank_groups(hosts_of(group), size, "host_groups", "size"), group.rank());
  auto host = group.subgroup(place.inside);
  return {.inside = std::move(host), .across = group.subgroup(place.across)};
}

// A host is gone once one of its ranks is, which the others notice at different times.
void ShardGossipOptimizerCore::agree_on_hosts() {
  auto& mixing = *gossip_->mixing;
  mixing.remove_ended();
  auto gone = at::zeros({static_cast<int64_t>(gossip_->sizes.size())}, at::kInt);
  for (const int host : mixing.statistics().removed) gone[host] = 1;
  state().group.all_reduce(gone, ReduceOp::max, state().label("hosts that have gone")).wait();
  gossip_->gone.clear();
  for (int host = 0; host < static_cast<int>(gossip_->sizes.size()); ++host) {
    if (gone[host].item<int>() != 0) gossip_->gone.push_back(host);
  }
  mixing.remove_lost(gossip_->gone);
}

// Each rank has peers of its own on the other hosts; if one rank's peers have ended, the rest of its host learns it
// here.
void ShardGossipOptimizerCore::on_the_whole_host(const std::function<void()>& work) {
  fail_together(state().group, state().label("whether hosts have answered"),
                "ShardGossipOptimizer: a host has ended, as detected by another rank of this host", work);
}

const Group& ShardGossipOptimizerCore::remaining() {
  agree_on_hosts();
  return gossip_->mixing->remaining();
}

// World ranks. Each rank of a host knows those at its own place on the other hosts, but for an elastic job whose hosts
// have become unequal.
std::vector<std::vector<int>> ShardGossipOptimizerCore::ranks_of_hosts() const {
  if (!gossip_->ranks.empty()) return gossip_->ranks;
  const auto& across = gossip_->across;
  const auto& inside = state().group;
  std::vector<int64_t> own;
  for (int host = 0; host < across.size(); ++host) own.push_back(across.world_rank(host));
  auto all = at::empty({inside.size(), across.size()}, at::kLong);
  inside.all_gather(all, at::tensor(own, at::kLong), state().label("the ranks of the hosts")).wait();
  std::vector<std::vector<int>> ranks(static_cast<size_t>(across.size()));
  for (int host = 0; host < across.size(); ++host) {
    for (int place = 0; place < inside.size(); ++place) ranks[host].push_back(all[place][host].item<int>());
  }
  return ranks;
}

Group ShardGossipOptimizerCore::remaining(const Group& all) {
  agree_on_hosts();
  const auto& gone = gossip_->gone;
  if (gone.empty()) return all;
  if (gossip_->remaining && gossip_->hosts_gone == gone.size()) return *gossip_->remaining;
  const auto by_host = ranks_of_hosts();
  std::set<int> left;
  for (int host = 0; host < static_cast<int>(by_host.size()); ++host) {
    if (std::count(gone.begin(), gone.end(), host) == 0) left.insert(by_host[host].begin(), by_host[host].end());
  }
  std::vector<int> ranks;
  for (int rank = 0; rank < all.size(); ++rank) {
    if (left.count(all.world_rank(rank)) > 0) ranks.push_back(rank);
  }
  gossip_->remaining = all.subgroup(ranks);
  gossip_->hosts_gone = gone.size();
  return *gossip_->remaining;
}

}  // namespace shoal
