#pragma once
// ShardGossipOptimizer: decentralised training of hosts. The ranks of a host shard the model with
// FullyShardedDataParallel, and every rank averages its shards with the ranks of the same index on a few other hosts.

#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "shoal/decentralized.h"
#include "shoal/detail/local_optimizer.h"
#include "shoal/fsdp.h"
#include "shoal/mean_parameters.h"
#include "shoal/topology.h"

namespace shoal {

struct ShardGossipOptions {
  // Behaviour.
  std::optional<Topology> topology{};  // topology of the hosts; none: one-peer-exp
  // Average in step k + 1 the values that hosts published after step k, as DecentralizedDataParallel does, so that the
  // exchange overlaps with a step. Off: average at the end of step k, which waits for the neighbours; a complete
  // topology with SGD (also with momentum) then equals ShardingStrategy::hybrid_shard.
  bool overlap = true;
  double neighbour_timeout_seconds = 5;  // a host that is later is left out of the step; infinity: wait for it

  // Performance.
  double bucket_cap_mb = 25;                       // MiB of a shard per exchange
  std::optional<at::ScalarType> exchange_dtype{};  // dtype to which values are rounded before they are sent

  // Throws UsageError with a list of all invalid options.
  void validate(int hosts) const;
};

// Groups for hosts of `size` consecutive ranks; without a size, of the ranks of each host. `across`: the ranks with
// this rank's index on all hosts. Throws UsageError if hosts have different numbers of ranks. Collective.
struct HostGroups {
  Group inside;
  Group across;
};
HostGroups host_groups(const Group& group, std::optional<int> size = std::nullopt);

// Type-independent part of ShardGossipOptimizer.
class ShardGossipOptimizerCore : public FullyShardedOptimizerCore {
 public:
  ShardGossipOptimizerCore(FullyShardedCore& parallel, ParamGroups groups,
                           std::unique_ptr<torch::optim::OptimizerOptions> defaults, const OptimizerFactory& make,
                           bool element_wise, const Group& across, const ShardGossipOptions& gossip,
                           const FullyShardedOptimizerOptions& options);
  ~ShardGossipOptimizerCore() override;

  // Takes part in a step without an update, because this host's gradients are invalid (StepAbandoned): averages,
  // publishes, and drops the gradients. Collective over the host.
  void step_without_update();
  // Sets the parameters of all hosts to their mean, bit-equal on all hosts. Collective over all ranks of all hosts.
  void global_avg();
  // Scope in which parameters are the mean over hosts, to be read or given to save_module(). Steps and checkpoints in
  // it are UsageErrors; a checkpoint has the mean, too. Published values are unchanged, so training continues as if
  // nothing had happened. Collective over all ranks of all hosts; its end, over those of the host (communication errors
  // are thrown by the next call). Must not outlive the optimizer.
  [[nodiscard]] MeanParameters mean_parameters();
  // Consensus distance sqrt(mean over hosts of |x_i - x|^2), where x is the mean of the hosts' parameters x_i.
  // Collective over all ranks.
  double consensus_distance();
  // Ends the training of this rank; other hosts continue without its shards.
  void leave();
  const ExchangeStatistics& statistics() const;
  const Topology& topology() const;
  // Ranks with this rank's place on all hosts.
  const Group& across() const;
  // Ranks of `across` that have not been removed; the ranks of a host agree on them. Collective over all ranks.
  const Group& remaining();
  // Ranks of `all` (the group passed to host_groups()) on the remaining hosts. Collective over them.
  Group remaining(const Group& all);

  struct Gossip;

 protected:
  void complete_gradients() override;
  void begin_mixing();
  void end_gradients() override;
  void show_update() override;
  bool moves_without_update() const override { return true; }

 private:
  // For Elastic: see src/elastic/access.h.
  void require_regroupable(const FullyShardedCore& parallel, const Group& job) override;
  void regroup(FullyShardedCore& parallel, const Group& job, int64_t step) override;
  void unguard() override;

  void open();
  void refuse_in_elastic_job(const char* what) const;
  void gather();
  void require_own_values() const;
  void hold_mean();
  void hold_own();
  void keep_own();
  void restore_own();
  void on_the_whole_host(const std::function<void()>& work);
  void agree_on_hosts();
  std::vector<std::vector<int>> ranks_of_hosts() const;
  void mix();

  friend std::shared_ptr<CheckpointSource> checkpoint_source(FullyShardedCore& parallel,
                                                             ShardGossipOptimizerCore& optimizer, const Group& all);
  std::unique_ptr<Gossip> gossip_;
};

// For TrainingState(parallel, optimizer, all). all: the group passed to host_groups(). The ranks of the remaining hosts
// save; the checkpoint has that number of hosts.
std::shared_ptr<CheckpointSource> checkpoint_source(FullyShardedCore& parallel, ShardGossipOptimizerCore& optimizer,
                                                    const Group& all);
// Deleted: the ranks of one host cannot write the checkpoint alone.
std::shared_ptr<CheckpointSource> checkpoint_source(FullyShardedCore& parallel,
                                                    ShardGossipOptimizerCore& optimizer) = delete;

// Optimizer for decentralised training of hosts.
//
//   const auto hosts = shoal::host_groups(world.group());
//   shoal::FullyShardedDataParallel parallel(model, hosts.inside);
//   shoal::ShardGossipOptimizer<shoal::FusedAdamW> optimizer(parallel, torch::optim::AdamWOptions(1e-3), hosts.across);
//   ...
//   cross_entropy(parallel.forward(x), y).backward();  // gradients are the mean over the host
//   optimizer.step();
//   optimizer.zero_grad();
//
// Runs any libtorch optimizer on each rank's shards; see FullyShardedOptimizer. A host plays the role of a rank in
// DecentralizedDataParallel: x <- W x over its neighbours, then an update with the gradient at the values before
// averaging, then the new values are published. A rank keeps its shard, the optimizer state of it, and two published
// versions of it. Late hosts and hosts that have ended are treated like ranks there. If a rank ends, its host ends, as
// with FSDP alone: the other ranks of the host get a CommError that names it, and other hosts continue without the
// host. With Elastic (shoal/elastic.h) the host goes on without the rank.
//
// Constructor: collective over all ranks. Broadcasts the first host's trainable parameters; frozen parameters and
// buffers keep each host's values, so make them equal before. Throws as FullyShardedOptimizer; also UsageError for a
// topology of another size, DisagreeError if the hosts hold different shards or topologies.
template <class Local>
class ShardGossipOptimizer : public ShardGossipOptimizerCore {
 public:
  template <class Defaults>
  ShardGossipOptimizer(FullyShardedCore& parallel, ParamGroups groups, const Defaults& defaults, const Group& across,
                       const ShardGossipOptions& gossip = {}, const FullyShardedOptimizerOptions& options = {})
      : ShardGossipOptimizerCore(parallel, std::move(groups), detail::default_options<Local>(defaults),
                                 detail::local_optimizer_maker<Local>(defaults), element_wise<Local>, across, gossip,
                                 options) {}
  // One param group with all trainable parameters.
  template <class Defaults>
  ShardGossipOptimizer(FullyShardedCore& parallel, const Defaults& defaults, const Group& across,
                       const ShardGossipOptions& gossip = {}, const FullyShardedOptimizerOptions& options = {})
      : ShardGossipOptimizer(parallel, ParamGroups(), defaults, across, gossip, options) {}
};

}  // namespace shoal
