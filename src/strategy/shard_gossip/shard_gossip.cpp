#include "shoal/shard_gossip.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/utils.h>

#include <utility>

#include "engine/sharded/sharded_ranges.h"
#include "shoal/error.h"
#include "shoal/group.h"
#include "strategy/shard_gossip/state.h"

namespace shoal {
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

ShardGossipOptimizerCore::ShardGossipOptimizerCore(FullyShardedCore& parallel, ParamGroups groups,
                                                   std::unique_ptr<torch::optim::OptimizerOptions> defaults,
                                                   const OptimizerFactory& make, bool element_wise, const Group& across,
                                                   const ShardGossipOptions& gossip,
                                                   const FullyShardedOptimizerOptions& options)
    : FullyShardedOptimizerCore(parallel, std::move(groups), checked(std::move(defaults), gossip, across), make,
                                element_wise, options),
      gossip_(std::make_unique<Gossip>(parallel.group(), across, gossip)) {
  gossip_->open(*state().modules.front());
  open();
}

void ShardGossipOptimizerCore::Gossip::open(ShardedModule& module) {
  buckets = divide(module, module.pieces(), options.bucket_cap_mb);
  std::vector<std::string> shard{
      fmt::format("overlap {}", options.overlap), fmt::format("bucket_cap_mb {}", options.bucket_cap_mb),
      fmt::format("exchange_dtype {}", options.exchange_dtype ? toString(*options.exchange_dtype) : "none")};
  std::vector<GossipBuffer> buffers;
  for (const auto& bucket : buckets) {
    for (const auto& [name, piece] : bucket.members()) {
      shard.push_back(fmt::format("{} {} [{}]", name, toString(piece.scalar_type()), fmt::join(piece.sizes(), ", ")));
    }
    buffers.push_back({bucket.numel(), bucket.dtype()});
  }
  agree(across, "the options of ShardGossipOptimizer and the shards that hosts average", shard);
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
      "ShardGossipOptimizer: a step within a scope of mean_parameters(), where the parameters are the mean over hosts "
      "and go back to this host's own: end that first");
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

void ShardGossipOptimizerCore::step_without_update() {
  const torch::NoGradGuard no_grad;
  refuse_in_elastic_job("step_without_update()");
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

}  // namespace shoal
