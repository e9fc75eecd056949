// The mean of the hosts' parameters: adopted, shown for a while, and the hosts' distance from it.

#include <cmath>

#include "engine/sharded/sharded_ranges.h"
#include "shoal/error.h"
#include "shoal/group.h"
#include "strategy/shard_gossip/state.h"

namespace shoal {

void ShardGossipOptimizerCore::global_avg() {
  const torch::NoGradGuard no_grad;
  refuse_in_elastic_job("global_avg()");
  for (const auto& module : state().modules) module->require_not_lent("global_avg()");
  agree_on_hosts();
  average(*gossip_->mixing, gossip_->buckets,
          state().label("global average, after equal steps (step_without_update() without a batch)"));
  state().publish();
}

MeanParameters ShardGossipOptimizerCore::mean_parameters() {
  hold_mean();
  return MeanParameters({}, [this] { hold_own(); });
}

void ShardGossipOptimizerCore::hold_mean() {
  const torch::NoGradGuard no_grad;
  if (gossip_->holds_mean) throw UsageError("ShardGossipOptimizer: mean_parameters() within a scope of it");
  for (const auto& module : state().modules) module->require_not_lent("mean_parameters()");
  agree_on_hosts();
  const auto& hosts = gossip_->mixing->remaining();
  keep_own();
  try {
    on_the_whole_host([&] { average(hosts, gossip_->buckets, state().label("mean of the hosts")); });
  } catch (const CommError&) {  // no rank has seen the mean
    restore_own();
    throw;
  }
  state().publish();
}

// In an elastic job, where the other ranks of the host can put them back.
void ShardGossipOptimizerCore::keep_own() {
  auto& gossip = *gossip_;
  if (state().has_commit()) {
    gossip.saved = std::make_unique<SavedValues>(state().group, state().shared_targets(param_groups_));
    gossip.saved->save(state().group.rank());
  } else {
    for (const auto& bucket : gossip.buckets) {
      gossip.own.push_back(at::zeros({bucket.numel()}, at::TensorOptions(bucket.dtype())));
      bucket.write_to(gossip.own.back());
    }
  }
  gossip.holds_mean = true;
}

void ShardGossipOptimizerCore::restore_own() {
  auto& gossip = *gossip_;
  if (gossip.saved) gossip.saved->restore(state().group.rank());
  for (size_t i = 0; i < gossip.own.size(); ++i) gossip.buckets[i].read_from(gossip.own[i]);
  gossip.own.clear();
  gossip.holds_mean = false;
}

void ShardGossipOptimizerCore::hold_own() {
  const torch::NoGradGuard no_grad;
  try {
    state().group.barrier(state().label("end of the mean")).wait();  // ranks of this host may still read it
  } catch (...) {
    restore_own();
    throw;
  }
  restore_own();
  state().publish();
}

double ShardGossipOptimizerCore::consensus_distance() {
  const torch::NoGradGuard no_grad;
  const auto label = state().label("consensus distance");
  agree_on_hosts();
  auto squares = at::zeros({1}, at::kDouble);
  on_the_whole_host([&] { squares += squared_distance(gossip_->mixing->remaining(), gossip_->buckets, label); });
  state().group.all_reduce(squares, ReduceOp::sum, label).wait();
  return std::sqrt(squares.item<double>());
}

}  // namespace shoal
