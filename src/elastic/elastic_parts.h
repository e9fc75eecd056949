#pragma once
// Strategy-dependent part of an elastic training.

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/reducer/reducer.h"
#include "module/walk.h"
#include "shoal/ddp.h"
#include "shoal/detail/elastic_training.h"
#include "shoal/detail/sharded_optimizer.h"
#include "shoal/local_updates.h"
#include "shoal/megatron.h"
#include "shoal/telemetry.h"
#include "shoal/world.h"

namespace shoal {

class ElasticParts {
 public:
  // sharded: the optimizer, if each rank updates only its share; otherwise nullptr.
  explicit ElasticParts(ShardedOptimizerBase* sharded) : sharded_(sharded) {}
  virtual ~ElasticParts();
  ElasticParts(const ElasticParts&) = delete;
  ElasticParts& operator=(const ElasticParts&) = delete;

  virtual torch::nn::Module& module() const = 0;
  // Synchronising steps so far.
  virtual int64_t step() const = 0;
  // How often gradients of all ranks have been reduced so far.
  virtual int64_t reductions() const { return step(); }
  // Called before the first gradient of each backward; nullptr: nothing.
  virtual void before_backward(std::function<void()> listener) = 0;
  virtual NoSync no_sync(bool accumulate) = 0;
  virtual torch::optim::Optimizer& optimizer() const = 0;
  // Of gradients; nullptr: none that has a memory.
  virtual Reducer* reducer() const = 0;
  // Parameters and buffers that all ranks hold alike.
  virtual ModuleTensors tensors() const = 0;
  // Copies of frozen parameters in higher precision.
  virtual std::vector<at::Tensor> frozen_copies() const { return {}; }
  virtual LoggingData logging_data() const = 0;
  // The factor of this rank's gradients in the mean, from now on, unless backwards have weights; none: 1 / ranks.
  virtual void set_share(std::optional<double> share) = 0;
  // False: ranks have no mean in common, and set_share() does nothing.
  virtual bool takes_shares() const { return true; }
  // To be called behind the share of a step that only some ranks compute; in its place by the others, whose parameters
  // it may need.
  virtual void meet_behind_share() {}
  // Whether its shards need no memory that ranks have in common.
  virtual bool shards_over_sockets() const { return false; }
  // Whether ranks that come get parameters and the optimizer's state in regroup(), each its shards alone.
  virtual bool gives_shards(const Group& /*group*/) const { return false; }
  // In such a rank, before that: its own are not the job's.
  virtual void come_without_shards() {}
  // The parameters that are among these shards.
  virtual std::vector<at::Tensor> divided() const;
  // Whether the others have all shards without these ranks of the present group.
  virtual bool can_spare(const std::vector<int>& /*ranks*/) const { return true; }
  // Why processes cannot join this training; empty: they can.
  virtual std::string why_closed() const { return ""; }
  // Of one host: why those of other hosts cannot, or those of this one over sockets.
  virtual std::string why_one_host() const;
  // Whether grad() of the parameter, a tensor without memory, stands for a gradient that has not been zeroed.
  virtual bool stands_for_gradient(const at::Tensor& /*parameter*/) const { return false; }
  // Goes on in another group, after `step` complete steps. It may be called again if it fails. Collective.
  virtual void regroup(const Group& group, int64_t step) = 0;

  // Whether each rank updates only its share.
  bool sharded() const { return sharded_ != nullptr; }
  // Whether a rank that has the gradients of a step can finish it by itself. Otherwise all need commit().
  bool finishes_alone() const;
  // Once the world is that of an elastic job. Collective.
  virtual void guard();
  // While true, what needs all shares of a rank is refused.
  virtual void compute_shares(bool now);
  // Before and after the ranks have met with their gradients. The first returns whether `map` of the second must be
  // true. Afterwards all ranks that live may update, or it is CommError for all of them. Collective.
  virtual bool prepare_commit();
  void commit(bool map);
  // Whether the optimizer has refused its step before it changed anything, on all ranks. Waits until they have come so
  // far.
  bool update_was_refused() const;
  // After an update that returned: whether it did not call step() of a sharded optimizer, as other ranks did.
  bool misses_update() const;
  // How many updates this rank has made, where nothing else shows that the others have made as many.
  std::optional<int64_t> updates_to_compare() const;
  // A sharded optimizer of which other hosts hold the same shares: see ShardedOptimizerBase.
  bool has_replicas() const;
  void map_on_host(bool map);
  bool commit_over_hosts(bool came, const std::function<bool(bool passes)>& decide);
  // Whether a step's gradients are of all ranks.
  virtual bool reduces() const { return true; }
  // Whether the step in progress has failed, in forward or backward, which all ranks learn of.
  virtual bool is_broken() const { return reducer() != nullptr && reducer()->broken(); }
  // Behind an update: what it has left for the other ranks comes to them. Collective.
  void publish_update();
  // Scope of the update; nothing if none is needed. After an update that returned, check_update() throws UsageError if
  // it left out what it must do.
  virtual std::shared_ptr<void> begin_update();
  virtual void check_update() const {}

  // What ranks exchange after an update. exchange() communicates, changes nothing, and may be repeated;
  // apply_exchange(), once all ranks have come so far, changes values and does not communicate.
  virtual bool exchange_due() const { return false; }
  virtual void exchange() {}
  virtual void apply_exchange() {}

  // Between two steps: the optimizer's state by parameter, whoever owns it, one after the other. Tensors may be shared
  // with the state.
  virtual void visit_state(const std::function<void(const std::string& name, const NamedState& state)>& visit) const;
  // In a process that comes to the job: takes all of that. UsageError for state that does not fit.
  virtual void take_state(const OptimizerState& whole) const;
  // Elements that this rank's optimizer updates.
  int64_t updated_elements() const;
  // Who has what a rank had that is lost, in words.
  virtual std::string in_place_of_lost() const;
  // What is lost and what the ranks have that are left when a job cannot go on, in words.
  virtual std::string lost_shards() const;
  // Before processes are admitted, between two steps. Collective over the members.
  virtual void prepare_admission() {}
  // Gives newcomers among the group's ranks what is neither one rank's nor equal on all. Collective.
  virtual void give_rest(const Group& /*group*/, const std::vector<bool>& /*newcomers*/) {}
  // What ranks must have in common of a sharded optimizer: options, and what is divided.
  virtual std::vector<std::string> description() const;
  // The loss scaler of the optimizer's own; nullptr: none.
  GradScaler* own_scaler() const;

 private:
  ShardedOptimizerBase* sharded_;
};

// A wrapper and its optimizer: DistributedDataParallel with an optimizer that is whole on each rank, or with OSS
// (ZeRO-1), ShardedDataParallel with OSS (ZeRO-2), or FullyShardedDataParallel with its optimizer. The arguments must
// outlive the result. UsageError names what is not supported.
std::unique_ptr<ElasticParts> elastic_parts(const World& world, DataParallelCore& parallel,
                                            torch::optim::Optimizer& optimizer);
// DistributedOptimizer, which has no wrapper.
std::unique_ptr<ElasticParts> elastic_parts(const World& world, DistributedOptimizerCore& optimizer);

// LocalUpdates, which has no wrapper either, and an optimizer that is whole on each rank.
std::unique_ptr<ElasticParts> elastic_parts(const World& world, LocalUpdates& updates);

// A training of the registry.
std::unique_ptr<ElasticParts> elastic_parts(const World& world, ElasticTraining& training);

}  // namespace shoal
