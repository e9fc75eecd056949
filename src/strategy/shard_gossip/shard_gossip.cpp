#include "shoal/shard_gossip.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/utils.h>

#include <algorithm>
#include <set>

#include "comm/agreement/fail_together.h"
#include "comm/group/hosts.h"
#include "comm/group/rank_groups.h"
#include "engine/sharded/sharded_ranges.h"
#include "shoal/error.h"
#include "shoal/group.h"
#include "strategy/shard_gossip/state.h"

namespace shoal {

void ShardGossipOptions::validate(int hosts) const {
  std::vector<std::string> faults;
  const auto positive = [&](const char* name, double value, const char* unit) {
    if (!(value > 0)) faults.push_back(fmt::format("{} is {}: give {} above 0", name, value, unit));
  };
  positive("neighbour_timeout_seconds", neighbour_timeout_seconds, "seconds");
  positive("bucket_cap_mb", bucket_cap_mb, "MiB");
  if (topology && topology->size() != hosts) {
    faults.push_back(fmt::format("topology {} is for {} hosts, there are {}: make_topology(name, across.size())",
                                 topology->name(), topology->size(), hosts));
  }
  if (topology && topology->kind() == Stochastic::column) {
    faults.push_back(fmt::format(
        "topology {} is for push-sum, which shards do not support; give a row-stochastic or doubly stochastic topology",
        topology->name()));
  }
  if (exchange_dtype && !at::isFloatingType(*exchange_dtype)) {
    faults.push_back(fmt::format("exchange_dtype {}: give a floating-point one", toString(*exchange_dtype)));
  }
  if (!faults.empty()) throw UsageError(fmt::format("ShardGossipOptimizer: {}", fmt::join(faults, "; ")));
}

HostGroups host_groups(const Group& group, std::optional<int> size) {
  agree(group, "the ranks of a host", {size ? std::to_string(*size) : "where they run"});
  const auto place = place_of(rank_groups(hosts_of(group), size, "host_groups", "size"), group.rank());
  auto host = group.subgroup(place.inside);
  return {.inside = std::move(host), .across = group.subgroup(place.across)};
}

namespace {

// Groups consecutive pieces of one dtype into buckets, up to a cap.
std::vector<GossipBucket> divide(const ShardedModule& module, std::vector<OwnedPiece>& pieces, double cap_mb) {
  std::vector<GossipBucket> buckets;
  std::vector<NamedParameter> members;
  double bytes = 0;
  const auto finish = [&] {
    if (!members.empty()) buckets.emplace_back(std::exchange(members, {}));
    bytes = 0;
  };
  for (auto& piece : pieces) {
    const auto size = static_cast<double>(piece.main.nbytes());
    const bool other_dtype = !members.empty() && members.front().parameter.scalar_type() != piece.main.scalar_type();
    if (other_dtype || bytes + size > cap_mb * (1 << 20)) finish();
    members.push_back({module.reducer().gradients()[piece.gradient].name, piece.main});
    bytes += size;
  }
  finish();
  return buckets;
}

std::unique_ptr<torch::optim::OptimizerOptions> checked(std::unique_ptr<torch::optim::OptimizerOptions> defaults,
                                                        const ShardGossipOptions& gossip, const Group& across) {
  gossip.validate(across.size());
  return defaults;
}

}  // namespace

ShardGossipOptimizerCore::ShardGossipOptimizerCore(FullyShardedCore& parallel, const Group& across, ParamGroups groups,
                                                   std::unique_ptr<torch::optim::OptimizerOptions> defaults,
                                                   const Factory& make, bool element_wise,
                                                   const FullyShardedOptimizerOptions& options,
                                                   const ShardGossipOptions& gossip)
    : FullyShardedOptimizerCore(parallel, std::move(groups), checked(std::move(defaults), gossip, across), make,
                                element_wise, options),
      gossip_(std::make_unique<Gossip>(parallel.group(), across, gossip)) {
  gossip_->open(*state().modules.front());
  open();
}

void ShardGossipOptimizerCore::Gossip::open(ShardedModule& module) {
  buckets = divide(module, module.pieces(), options.bucket_cap_mb);
  std::vector<std::string> shard;
  std::vector<GossipBuffer> buffers;
  for (const auto& bucket : buckets) {
    for (const auto& [name, piece] : bucket.members()) {
      shard.push_back(fmt::format("{} {} [{}]", name, toString(piece.scalar_type()), fmt::join(piece.sizes(), ", ")));
    }
    buffers.push_back({bucket.numel(), bucket.dtype()});
  }
  agree(across, "the shards that hosts average", shard);
  mixing->open(buffers, options.exchange_dtype);
}

void ShardGossipOptimizerCore::Gossip::show() {
  for (size_t i = 0; i < buckets.size(); ++i) {
    const auto& bucket = buckets[i];
    mixing->show(i, [&](const at::Tensor& flat, double) { bucket.write_to(flat); });
  }
  mixing->end_step();
}

// Does not wait for its host: when a rank ends, its host ends.
ShardGossipOptimizerCore::~ShardGossipOptimizerCore() = default;

void ShardGossipOptimizerCore::open() {
  const torch::NoGradGuard no_grad;
  for (auto& bucket : gossip_->buckets) {
    auto values = at::zeros({bucket.numel()}, at::TensorOptions(bucket.dtype()));
    bucket.write_to(values);
    gossip_->across.broadcast(values, 0, state().label("the first host's parameters")).wait();
    bucket.read_from(values);
  }
  state().publish();
}

void ShardGossipOptimizerCore::require_own_values() const {
  if (!gossip_->holds_mean) return;
  throw UsageError(
      "ShardGossipOptimizer: a step between hold_mean() and hold_own() (in Python, within mean_parameters()), "
      "where the parameters are the mean over hosts and go back to this host's own: end that first");
}

void ShardGossipOptimizerCore::complete_gradients() {
  const torch::NoGradGuard no_grad;
  require_own_values();
  state().prepare_gradients();
  begin_mixing();
  if (state().has_commit()) return gather();
  if (gossip_->options.overlap) mix();
}

void ShardGossipOptimizerCore::begin_mixing() {
  if (gossip_->left) throw UsageError("ShardGossipOptimizer: this rank has called leave()");
  gossip_->mixing->begin_step();
}

void ShardGossipOptimizerCore::end_gradients() {
  const torch::NoGradGuard no_grad;
  gossip_->show();
  if (!gossip_->options.overlap) mix();
}

void ShardGossipOptimizerCore::mix() {
  for (size_t i = 0; i < gossip_->buckets.size(); ++i) {
    auto [own, others] = gossip_->mixing->gather(i);
    if (!others.defined()) continue;
    others = others.to(gossip_->buckets[i].device());
    gossip_->buckets[i].mix(own, others);
  }
}

void ShardGossipOptimizerCore::pass() {
  const torch::NoGradGuard no_grad;
  refuse_in_elastic_job("pass()");
  require_own_values();
  // No rank of the host may read the shards that are about to change; with gradients, backward's reduction ensures
  // that.
  state().group.barrier(state().label("pass")).wait();
  begin_mixing();
  if (gossip_->options.overlap) mix();
  end_gradients();
  state().publish();
  zero_grad();
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

void ShardGossipOptimizerCore::global_avg() {
  const torch::NoGradGuard no_grad;
  refuse_in_elastic_job("global_avg()");
  for (const auto& module : state().modules) module->require_not_lent("global_avg()");
  agree_on_hosts();
  average(*gossip_->mixing, gossip_->buckets,
          state().label("global average, after equal steps (pass() without a batch)"));
  state().publish();
}

void ShardGossipOptimizerCore::hold_mean() {
  const torch::NoGradGuard no_grad;
  if (gossip_->holds_mean) throw UsageError("ShardGossipOptimizer: hold_mean() again before hold_own()");
  for (const auto& module : state().modules) module->require_not_lent("hold_mean()");
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
    gossip.kept = std::make_unique<KeptValues>(state().group, state().shared_targets(param_groups_));
    gossip.kept->keep(state().group.rank());
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
  if (gossip.kept) gossip.kept->put_back(state().group.rank());
  for (size_t i = 0; i < gossip.own.size(); ++i) gossip.buckets[i].read_from(gossip.own[i]);
  gossip.own.clear();
  gossip.holds_mean = false;
}

void ShardGossipOptimizerCore::hold_own() {
  const torch::NoGradGuard no_grad;
  state().group.barrier(state().label("end of the mean")).wait();  // ranks of this host may still read it
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

void ShardGossipOptimizerCore::leave() {
  gossip_->left = true;
  gossip_->mixing->leave();
}

const ExchangeStatistics& ShardGossipOptimizerCore::statistics() const {
  return gossip_->mixing->statistics();
}

const Group& ShardGossipOptimizerCore::across() const {
  return gossip_->across;
}

const Topology& ShardGossipOptimizerCore::topology() const {
  return gossip_->mixing->topology();
}

const Group& ShardGossipOptimizerCore::remaining() {
  agree_on_hosts();
  return gossip_->mixing->remaining();
}

// World ranks. Each rank of a host knows those at its own place on the other hosts, but for an elastic job whose hosts have
// become unequal.
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
