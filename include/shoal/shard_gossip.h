#pragma once
// Gossip between hosts that each hold a model once: FullyShardedDataParallel among the ranks of a host, and every rank
// averages its shards with the ranks of the same number on a few other hosts (rows DEC19, BEY14).

#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "shoal/decentralized.h"
#include "shoal/detail/local_optimizer.h"
#include "shoal/fsdp.h"
#include "shoal/topology.h"

namespace shoal {

struct ShardGossipOptions {
  // Behaviour.
  std::optional<Topology> topology{};  // of the hosts; none: one-peer-exp
  // A host mixes in step k + 1 what hosts have shown after step k, as DecentralizedDataParallel does, so that exchanges
  // have a step's time. Off: at the end of step k, which waits for the neighbours; then a complete topology with SGD
  // (with momentum, too) is ShardingStrategy::hybrid_shard.
  bool overlap = true;
  double neighbour_timeout_seconds = 5;  // a host that is later is left out of the step

  // Performance.
  double bucket_cap_mb = 25;                       // MiB of a shard that are exchanged together
  std::optional<at::ScalarType> exchange_dtype{};  // neighbours get values rounded to this

  // Throws UsageError that lists all faults.
  void validate(int hosts) const;
};

// The groups that hosts of `size` ranks in a row need; without a size, the ranks of each host. `across` has the ranks
// of this rank's number on all hosts. Collective. UsageError where hosts have unequal numbers of ranks.
struct HostGroups {
  Group inside;
  Group across;
};
HostGroups host_groups(const Group& group, std::optional<int> size = std::nullopt);

// What ShardGossipOptimizer does, whatever the optimizer.
class ShardGossipOptimizerCore : public FullyShardedOptimizerCore {
 public:
  ShardGossipOptimizerCore(FullyShardedCore& parallel, const Group& across, ParamGroups groups,
                           std::unique_ptr<torch::optim::OptimizerOptions> defaults, const Factory& make,
                           bool element_wise, const FullyShardedOptimizerOptions& options,
                           const ShardGossipOptions& gossip);
  ~ShardGossipOptimizerCore() override;

  // A step without an update, for a host whose gradients are void (StepAbandoned): it mixes and shows. Collective over
  // the host.
  void pass();
  // Gives all hosts the mean of their parameters, bit for bit the same. Collective over all ranks of all hosts.
  void global_avg();
  // Parameters are the hosts' mean, to be read or saved, until hold_own(): no step may be taken meanwhile. What hosts
  // have shown stays as it is, so that training goes on as if nothing had been. Both collective, over all ranks.
  void hold_mean();
  void hold_own();
  // How far hosts are from their mean x: sqrt(mean over hosts of |x_i - x|^2). Collective over all ranks.
  double consensus_distance();
  // This rank trains no more; other hosts go on without its shards.
  void leave();
  const ExchangeStatistics& statistics() const;
  const Topology& topology() const;
  // Of `across`, those who have not been removed, about which a host's ranks agree. Collective over all ranks.
  const Group& remaining();
  // Of `all`, which host_groups() has divided, the ranks of those hosts. Collective over them.
  Group remaining(const Group& all);

  struct Gossip;

 protected:
  void complete_gradients() override;
  void begin_mixing();
  void end_gradients() override;
  bool moves_without_update() const override { return true; }

 private:
  void open();
  void restore_own();
  void on_the_whole_host(const std::function<void()>& work);
  void agree_on_hosts();
  void mix();
  void show();

  friend std::shared_ptr<CheckpointSource> checkpoint_source(FullyShardedCore& parallel,
                                                             ShardGossipOptimizerCore& optimizer, const Group& all);
  std::unique_ptr<Gossip> gossip_;
};

// For TrainingState(parallel, optimizer, all): the ranks that host_groups() has divided. Those of the hosts that are
// left save; the checkpoint is one of as many hosts.
std::shared_ptr<CheckpointSource> checkpoint_source(FullyShardedCore& parallel, ShardGossipOptimizerCore& optimizer,
                                                    const Group& all);
// One host's ranks do not make a checkpoint.
std::shared_ptr<CheckpointSource> checkpoint_source(FullyShardedCore& parallel,
                                                    ShardGossipOptimizerCore& optimizer) = delete;

//   const auto hosts = shoal::host_groups(world.group());
//   shoal::FullyShardedDataParallel parallel(model, hosts.inside);
//   shoal::ShardGossipOptimizer<shoal::FusedAdamW> optimizer(parallel, hosts.across, torch::optim::AdamWOptions(1e-3));
//   ...
//   cross_entropy(parallel.forward(x), y).backward();  // gradients are the host's mean
//   optimizer.step();
//   optimizer.zero_grad();
//
// Any libtorch optimizer, run on each rank over its ranges; see FullyShardedOptimizer. A host is what a rank is in
// DecentralizedDataParallel: x <- W x over its neighbours, an update with the gradient at the values before mixing, and
// the new values are shown. A rank keeps its shard, the optimizer's state of it, and two shown versions of it. Late
// hosts and hosts that have ended are treated as ranks there. A rank's end ends its host, as under FSDP alone: the
// host's other ranks get a CommError that names it, and other hosts go on without them.
//
// Constructor: all hosts get the first one's trainable parameters; frozen ones and buffers stay each host's own, so
// make them equal before. Collective over all ranks. Errors as FullyShardedOptimizer's; UsageError for a topology of
// another size; DisagreeError when hosts hold different shards or topologies.
template <class Local>
class ShardGossipOptimizer : public ShardGossipOptimizerCore {
 public:
  template <class Defaults>
  ShardGossipOptimizer(FullyShardedCore& parallel, const Group& across, const Defaults& defaults,
                       const ShardGossipOptions& gossip = {}, const FullyShardedOptimizerOptions& options = {})
      : ShardGossipOptimizerCore(parallel, across, ParamGroups(), detail::default_options<Local>(defaults),
                                 detail::local_optimizer_maker<Local>(defaults), element_wise<Local>, options, gossip) {
  }
};

}  // namespace shoal
