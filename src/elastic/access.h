#pragma once
// Functions of wrappers and optimizers that only Elastic calls. Users do not see them: they are private there.

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "module/walk.h"
#include "shoal/ddp.h"
#include "shoal/detail/elastic_training.h"
#include "shoal/fsdp.h"
#include "shoal/megatron.h"
#include "shoal/zero.h"

namespace shoal {

class ElasticAccess {
 public:
  using Optimizer = ShardedOptimizerBase;

  // From now on a step is guarded against the death of ranks: prepare_commit(), commit(), step(). State moves to memory
  // that the ranks share; where they share no parameters, they become second owners of what others own. Collective.
  static void guard(Optimizer& optimizer) { optimizer.guard(); }
  // Steps are as before Elastic from now on. Not collective.
  static void unguard(Optimizer& optimizer) { optimizer.unguard(); }
  // In a process that comes to a job with second owners: it gets its shards in regroup(), and has none before.
  static void come_without_shards(Optimizer& optimizer) { optimizer.come_without_shards(); }
  // While true, clipping is refused: gradients are those of some of a rank's shares.
  static void compute_shares(Optimizer& optimizer, bool now) { optimizer.compute_shares(now); }
  // All of a step that communicates: adopts changed values, and reduces, unscales, checks and clips the gradients.
  // Returns whether all ranks must map memory in commit(). Collective.
  static bool prepare_commit(Optimizer& optimizer) { return optimizer.prepare_commit(); }
  // All ranks that live pass, or none does: CommError. Collective.
  static void commit(Optimizer& optimizer, bool map) { optimizer.commit(map); }
  // The ranks over which the state is sharded, and those that hold the same shares.
  static Group job(const Optimizer& optimizer) { return optimizer.job(); }
  // Whether the last step() of an elastic job was refused before it changed anything, on all ranks of the host. Waits
  // until they have come so far.
  static bool update_was_refused(const Optimizer& optimizer) { return optimizer.update_was_refused(); }
  // After the update of an elastic job: whether it did not call step(), as others did. Of second owners the others
  // learn later.
  static bool misses_update(const Optimizer& optimizer) { return optimizer.misses_update(); }
  // Of second owners: how many updates this rank has made, for a comparison. One that all ranks leave out is a step
  // that they skip.
  static std::optional<int64_t> updates_to_compare(const Optimizer& optimizer) {
    return optimizer.updates_to_compare();
  }
  // Whether other hosts hold the same shares, or average with them. The commit is then that of all hosts:
  // map_on_host(), once all ranks of this host have prepared; and commit_over_hosts(), as GuardedUpdate has it, once
  // all ranks have come to a meeting after that, or it has failed.
  static bool has_replicas(const Optimizer& optimizer) { return optimizer.has_replicas(); }
  static void map_on_host(Optimizer& optimizer, bool map) { optimizer.map_on_host(map); }
  static bool commit_over_hosts(Optimizer& optimizer, bool came, const std::function<bool(bool passes)>& decide) {
    return optimizer.commit_over_hosts(came, decide);
  }
  // Whether each shard has a second owner, with which the first one shares no memory. A rank that has come through
  // prepare_commit() can then finish its step by itself: allow_update(), step(). No rank needs commit().
  static bool has_second_owners(const Optimizer& optimizer) { return optimizer.has_second_owners(); }
  static void allow_update(Optimizer& optimizer) { optimizer.allow_update(); }
  // Of second owners, behind that step: whole parameters get the updates of all ranks. Collective.
  static void publish_update(Optimizer& optimizer) { optimizer.publish_update(); }
  // Options that ranks must have in common, beside those of the param groups: one line each.
  static std::vector<std::string> description(const Optimizer& optimizer) { return optimizer.description(); }
  // The loss scaler of the optimizer; nullptr: none.
  static GradScaler* own_scaler(const Optimizer& optimizer) { return optimizer.own_scaler(); }
  // Between two guarded steps: what state_dict() has, one parameter after the other, whoever owns it. Tensors may be
  // shared with the state. Not collective.
  static void visit_state(Optimizer& optimizer, const torch::nn::Module& module,
                          const std::function<void(const std::string& name, const NamedState& state)>& visit) {
    optimizer.visit_state(module, visit);
  }
  // In a process that comes to the job, and is alone so far: takes that state. UsageError as for load_state_dict().
  static void take_state(Optimizer& optimizer, const torch::nn::Module& module, const OptimizerState& whole) {
    optimizer.take_state(module, whole);
  }
  // Whether grad() of the parameter stands for a gradient in a buffer that has not been zeroed.
  static bool has_buffered_gradient(const ShardedOptimizerCore& optimizer, const at::Tensor& parameter) {
    return optimizer.has_buffered_gradient(parameter);
  }

  // UsageError that names what cannot go on in another group.
  static void require_regroupable(const DistributedDataParallelCore& parallel) { parallel.require_regroupable(); }
  static void require_regroupable(const DistributedOptimizerCore& optimizer) { optimizer.require_regroupable(); }
  static void require_regroupable(FullyShardedCore& parallel) { parallel.require_regroupable(); }
  // UsageError also if `optimizer` is not this wrapper's only one.
  static void require_regroupable(const ShardedDataParallelCore& parallel, const torch::optim::Optimizer& optimizer) {
    parallel.require_regroupable(optimizer);
  }
  // job: the ranks of the job. They are those of the optimizer's group, or those of several hosts, equally many of
  // each, and the group has those of this host.
  static void require_regroupable(OSSCore& optimizer, const Group& job) { optimizer.require_regroupable(job); }
  // UsageError unless it is this wrapper's optimizer and outlives ranks. Collective over `job`, the ranks of the job.
  static void require_regroupable(FullyShardedOptimizerCore& optimizer, const FullyShardedCore& parallel,
                                  const Group& job) {
    optimizer.require_regroupable(parallel, job);
  }
  // UsageError that names what does not go together with second owners of parameters.
  static void require_second_owners(const ShardedDataParallelCore& parallel) { parallel.require_second_owners(); }

  // Goes on in another group with the parameters and the state of the former one, all of whose guarded steps are
  // complete, after `step` synchronising steps. Drops gradients. If it fails, it may be called again with a further
  // group. Collective over `group`.
  static void regroup(DistributedOptimizerCore& optimizer, const Group& group, int64_t step) {
    optimizer.regroup(group, step);
  }
  // The same; also in the group of the ranks on this host, if the optimizer is in that.
  static void regroup(OSSCore& optimizer, const Group& group, int64_t step) { optimizer.regroup(group, step); }
  // The same with its wrapper. job: the ranks of the job that are left.
  static void regroup(FullyShardedOptimizerCore& optimizer, FullyShardedCore& parallel, const Group& job,
                      int64_t step) {
    optimizer.regroup(parallel, job, step);
  }
  // Goes on in another group, whose ranks hold the same model. The caller has dropped gradients. moved: the optimizer
  // has given the parameters other memory. Collective over `group` with a communication hook.
  static void regroup(DistributedDataParallelCore& parallel, const Group& group, int64_t step, bool moved) {
    parallel.regroup(group, step, moved);
  }
  // Goes on in the group of its optimizer. The caller has dropped gradients. Collective.
  static void regroup(ShardedDataParallelCore& parallel, int64_t step) { parallel.regroup(step); }

  // Whether ranks of other hosts own other parameters, or have other shards.
  static bool shards_across_hosts(const OSSCore& optimizer) { return optimizer.shards_across_hosts(); }
  static bool shards_across_hosts(const DistributedOptimizerCore& optimizer) { return optimizer.shards_across_hosts(); }
  // Whether ranks of this group would share no parameters, so that each shard has a second owner.
  static bool needs_second_owners(const OSSCore& optimizer, const Group& job) {
    return optimizer.needs_second_owners(job);
  }
  static bool needs_second_owners(const DistributedOptimizerCore& optimizer, const Group& job) {
    return optimizer.needs_second_owners(job);
  }
  static bool needs_second_owners(const FullyShardedCore& parallel, const Group& job) {
    return parallel.needs_second_owners(job);
  }
  // Where the optimizer's parameters have second owners, they get sums of gradients from now on. Not collective.
  static void send_to_second_owners(ShardedDataParallelCore& parallel) { parallel.send_to_second_owners(); }
  // Whether a rank updates the parameter.
  static bool has_owner(const OSSCore& optimizer, const at::Tensor& parameter) {
    return optimizer.has_owner(parameter);
  }

  // Called before the first gradient of each backward; nullptr: nothing.
  static void before_backward(DataParallelCore& parallel, std::function<void()> listener) {
    parallel.before_backward(std::move(listener));
  }
  static void before_backward(DistributedOptimizerCore& optimizer, std::function<void()> listener) {
    optimizer.before_backward(std::move(listener));
  }
  // UsageError, which names Elastic, unless the optimizer holds exactly the trainable parameters.
  static void check_optimizer(const DistributedDataParallelCore& parallel, const torch::optim::Optimizer& optimizer) {
    parallel.check_optimizer(optimizer, "Elastic");
  }
  // The factor of this rank's gradients in the mean, from now on; none: 1 / ranks.
  static void set_share(DistributedOptimizerCore& optimizer, std::optional<double> share) {
    optimizer.set_share(share);
  }
  // The single chunk's: gradients, parameters and buffers.
  static Reducer& reducer(const DistributedOptimizerCore& optimizer) { return optimizer.reducer(); }
  static ModuleTensors tensors(const DistributedOptimizerCore& optimizer) { return optimizer.tensors(); }

  // Of each frozen parameter that param_dtype has rounded the float32 copy, which ranks share.
  static std::vector<at::Tensor> frozen_copies(const FullyShardedCore& parallel) { return parallel.frozen_copies(); }
  // While true, clipping is refused: gradients are those of some of a rank's shares. What was written to pages is
  // adopted before. UsageError with check_unit_order over pages. Collective.
  static void compute_shares(FullyShardedCore& parallel, bool now) { parallel.compute_shares(now); }
  // Behind the share of a batch that only some ranks compute, on these; and in its place on the others, which take part
  // in its gathers. Collective.
  static void meet_behind_share(FullyShardedCore& parallel) { parallel.meet_behind_share(); }

  // See ElasticTraining.
  static void require_elastic(ElasticTraining& training) { training.require_elastic(); }
  static DataParallelCore* data_parallel(ElasticTraining& training) { return training.data_parallel(); }
  static LocalUpdates* local_updates(ElasticTraining& training) { return training.local_updates(); }
  static GradScaler* loss_scaler(ElasticTraining& training) { return training.loss_scaler(); }
  static std::vector<std::string> description(const ElasticTraining& training) { return training.description(); }
  static void prepare_step(ElasticTraining& training) { training.prepare_step(); }
  static void leave_groups(ElasticTraining& training) { training.leave_groups(); }
  static void follow(ElasticTraining& training, const Group& group) { training.follow(group); }
};

}  // namespace shoal
