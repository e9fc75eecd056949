// Checkpoint source of ShardGossipOptimizer.

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/utils.h>

#include <algorithm>
#include <numeric>

#include "checkpoint/on_all_ranks.h"
#include "shoal/error.h"
#include "strategy/fsdp/source.h"
#include "strategy/shard_gossip/state.h"

namespace shoal {
namespace {

constexpr const char* gossip_entry = "gossip";

// Each host has values of its own, sharded in the same way among its ranks.
class ShardGossipSource : public FullyShardedSource {
 public:
  ShardGossipSource(FullyShardedCore& parallel, FullyShardedCore::Shards& shards, ShardGossipOptimizerCore& optimizer,
                    ShardedOptimizerCore::State& state, ShardGossipOptimizerCore::Gossip& gossip, Group all)
      : FullyShardedSource(parallel, shards, optimizer, state),
        optimizer_(optimizer),
        gossip_(gossip),
        all_(std::move(all)) {
    const auto& sizes = gossip_.sizes;
    const bool equal = std::all_of(sizes.begin(), sizes.end(), [&](int size) { return size == sizes.front(); });
    strategy_ = fmt::format("hybrid_gossip of {} ranks", fmt::join(equal ? std::vector{sizes.front()} : sizes, ", "));
    if (std::accumulate(sizes.begin(), sizes.end(), 0) == all_.size()) return;
    throw UsageError(
        fmt::format("TrainingState: hosts of {} ranks do not match the {} ranks of the group; pass the group that was "
                    "given to host_groups(), or world.group() in an elastic job",
                    fmt::join(sizes, ", "), all_.size()));
  }

  std::string strategy() const override { return strategy_; }
  Group group() override { return optimizer_.remaining(all_); }
  std::optional<Group> peers() override { return gossip_.mixing->remaining(); }

  void require_own_values() const override {
    FullyShardedSource::require_own_values();
    if (!gossip_.holds_mean) return;
    throw UsageError(
        "ShardGossipOptimizer: a checkpoint within a scope of mean_parameters(), where the parameters are the mean "
        "over hosts and go back to this host's own: save and load outside of that. A checkpoint has the mean, too; "
        "save_module() of the full parameters, summoned meanwhile, writes it alone");
  }

  CarriedStates carried() override {
    auto all = FullyShardedSource::carried();
    all.own.values[gossip_entry] = {
        {"version", gossip_.mixing->version()}, {"mass", gossip_.mixing->mass()}, {"numel", numel()}};
    return all;
  }

  void begin_load(const CarriedStates& past) override {
    on_all_ranks(group(), "checkpoint", [&] { parse(past.own.values); });
    FullyShardedSource::begin_load(past);
  }

  // The last shown values are the hosts' present ones; if another strategy wrote the checkpoint, all hosts hold the
  // same.
  void end_load(const CarriedStates& past) override {
    const torch::NoGradGuard no_grad;
    FullyShardedSource::end_load(past);
    const auto mass = gossip_.mixing->weights_from(mass_, numel_.empty() || numel_ == numel());
    mass_lost_ = !mass;
    gossip_.mixed_at.reset();  // what was gathered is of the values before
    gossip_.mixing->resume_from(std::max<int64_t>(0, version_ - 1), mass.value_or(std::vector<double>()));
    if (version_ == 0) return;
    gossip_.show();
  }

  std::vector<std::string> differences() const override {
    auto list = FullyShardedSource::differences();
    if (mass_lost_) list.emplace_back(push_sum_begins_anew);
    return list;
  }

 private:
  std::vector<int64_t> numel() const {
    std::vector<int64_t> list;
    for (const auto& bucket : gossip_.buckets) list.push_back(bucket.numel());
    return list;
  }

  void parse(const nlohmann::json& own) {
    version_ = 0;
    mass_.clear();
    numel_.clear();
    if (own.is_null()) return;
    try {
      version_ = own.at(gossip_entry).at("version");
      const auto& gossip = own.at(gossip_entry);
      mass_ = gossip.at("mass").get<std::vector<double>>();
      if (gossip.contains("numel")) numel_ = gossip["numel"].get<std::vector<int64_t>>();
    } catch (const nlohmann::json::exception&) {  // a file's content is not trusted
      throw CheckpointError(fmt::format("a rank's state was not written by shoal: {}", own.dump()));
    }
  }

  ShardGossipOptimizerCore& optimizer_;
  ShardGossipOptimizerCore::Gossip& gossip_;
  Group all_;
  std::string strategy_;
  int64_t version_ = 0;  // of the loaded training
  std::vector<double> mass_{};
  std::vector<int64_t> numel_{};  // by bucket; empty: not known
  bool mass_lost_ = false;        // in the last load
};

}  // namespace

std::shared_ptr<CheckpointSource> checkpoint_source(FullyShardedCore& parallel, ShardGossipOptimizerCore& optimizer,
                                                    const Group& all) {
  return std::make_shared<ShardGossipSource>(parallel, *parallel.shards_, optimizer, optimizer.state(),
                                             *optimizer.gossip_, all);
}

}  // namespace shoal
