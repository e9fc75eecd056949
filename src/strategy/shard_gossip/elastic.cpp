// ShardGossipOptimizer in an elastic job. A step mixes what its hosts have shown after the step before, so that all of
// what communicates comes before the commit; the guarded update mixes it in.

#include <fmt/format.h>
#include <torch/utils.h>

#include <algorithm>
#include <numeric>

#include "comm/group/hosts.h"
#include "comm/group/rank_groups.h"
#include "engine/sharded/shard_groups.h"
#include "engine/sharded/sharded_ranges.h"
#include "shoal/error.h"
#include "strategy/shard_gossip/state.h"

namespace shoal {

void ShardGossipOptimizerCore::refuse_in_elastic_job(const char* what) const {
  if (!state().has_commit()) return;
  throw UsageError(
      fmt::format("ShardGossipOptimizer: {} in an elastic job: it changes the parameters outside of Elastic::step(), "
                  "where a rank that ends would leave some of them changed: call it once the Elastic has ended. "
                  "mean_parameters() shows the hosts' mean meanwhile",
                  what));
}

void ShardGossipOptimizerCore::require_regroupable(const FullyShardedCore& parallel, const Group& job) {
  const auto refuse = [](const std::string& fault) { throw UsageError("Elastic: ShardGossipOptimizer: " + fault); };
  require_own(parallel);
  const auto place = hybrid_ranks(ranks_by_host(hosts_of(job)), job.rank());
  if (world_ranks(state().group) != place.inside || world_ranks(gossip_->across) != place.across) {
    refuse("its groups are not those of the job's hosts: make them with host_groups(world.group()), without a size");
  }
  if (!gossip_->options.overlap) {
    refuse("overlap is off, so that values change once more after an update, which a rank's end could cut off: set it");
  }
  gossip_->names = names_of_hosts(job);
  state().everybody = job;
  try {
    ShardedOptimizerCore::require_regroupable();
  } catch (...) {
    state().everybody = state().group;
    throw;
  }
}

void ShardGossipOptimizerCore::unguard() {
  FullyShardedOptimizerCore::unguard();
  state().everybody = state().group;
}

// Once for each version: a step that all ranks refuse is done again, and what others have shown is read once.
void ShardGossipOptimizerCore::gather() {
  auto& gossip = *gossip_;
  if (gossip.mixed_at != gossip.mixing->version()) {
    gossip.mixed_in.clear();
    gossip.gathered.resize(gossip.buckets.size());
    for (size_t i = 0; i < gossip.buckets.size(); ++i) {
      const auto& bucket = gossip.buckets[i];
      const auto [own, others] = gossip.mixing->gather(i);
      if (!others.defined()) continue;
      auto& kept = gossip.gathered[i];
      if (!kept.defined()) kept = state().group.allocate(bucket.numel(), at::TensorOptions(bucket.dtype()));
      kept.copy_(others);
      const auto views = bucket.views_of(kept);
      for (size_t member = 0; member < views.size(); ++member) {
        const auto& values = bucket.members()[member].parameter;
        gossip.mixed_in[values.unsafeGetTensorImpl()] = {.others = views[member], .own = own};
      }
    }
    // Outside of an elastic job, a step goes on without the values of a rank that has ended. Here it starts over, once
    // the ranks of that rank's host have taken over its shard.
    if (!gossip.mixing->statistics().removed.empty()) {
      throw CommError("a rank of another host has ended, and has not shown what this step mixes in");
    }
    gossip.mixed_at = gossip.mixing->version();
  }
  state().commit.mixed_in = gossip.mixed_in;
}

void ShardGossipOptimizerCore::show_update() {
  gossip_->show();
}

// Hosts that are left may have different numbers of ranks. As many of each own shards as the smallest has, equal ones
// on all hosts. All hosts are after the same step, and show its values anew.
void ShardGossipOptimizerCore::regroup(FullyShardedCore& parallel, const Group& job, int64_t step) {
  const auto ranks = ranks_by_host(hosts_of(job));
  const auto place = hybrid_ranks(ranks, job.rank());
  const auto inside = job.subgroup(place.inside);
  auto& gossip = *gossip_;
  // The ranks may have changed while parameters held the hosts' mean, or while only some ranks had kept their own
  // values.
  if (gossip.saved) gossip.saved->restore_all();
  inside.barrier().wait();
  gossip.saved.reset();
  gossip.holds_mean = false;
  ShardGroups groups{.all = inside, .shard = inside, .places = std::vector<int>(place.inside.size())};
  std::iota(groups.places.begin(), groups.places.end(), 0);
  groups.owners = smallest(ranks);
  groups.equal = groups.owners * static_cast<int>(ranks.size()) == job.size();
  FullyShardedOptimizerCore::regroup(parallel, groups, job, step);

  const torch::NoGradGuard no_grad;
  const bool owns = !place.across.empty();
  gossip.across = job.subgroup(owns ? place.across : std::vector<int>{job.rank()});
  gossip.sizes.clear();
  gossip.ranks.clear();
  gossip.gone.clear();
  for (const auto& host : ranks) {
    gossip.sizes.push_back(static_cast<int>(host.size()));
    auto& members = gossip.ranks.emplace_back();
    for (const int rank : host) members.push_back(job.world_rank(rank));
  }
  gossip.gathered.clear();
  gossip.mixed_in.clear();
  gossip.mixed_at.reset();
  gossip.remaining.reset();
  const auto present = names_of_hosts(job);
  std::vector<int> absent;
  for (size_t host = 0; host < gossip.names.size(); ++host) {
    const bool here = std::find(present.begin(), present.end(), gossip.names[host]) != present.end();
    if (!here) absent.push_back(static_cast<int>(host));
  }
  const auto left = absent.empty() ? gossip.topology : gossip.topology.without(absent);
  if (!gossip.version) gossip.version = gossip.mixing->version();
  auto mixing = std::make_unique<Mixing>(gossip.across, owns ? left : make_topology("complete", 1),
                                         gossip.options.neighbour_timeout_seconds);
  mixing->count_from(gossip.mixing->statistics());
  gossip.mixing = std::move(mixing);
  gossip.open(*state().modules.front());
  const auto version = *gossip.version;
  if (version > 0) {
    gossip.mixing->resume_from(version - 1, std::vector<double>(gossip.buckets.size(), 1));
    gossip.show();
  }
  gossip.version.reset();
}

}  // namespace shoal
