#pragma once
// Bases of the optimizers that update only what this rank owns.

#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "shoal/detail/local_optimizer.h"
#include "shoal/group.h"
#include "shoal/optimizer_state.h"
#include "shoal/precision.h"

namespace shoal {

class ShardedModule;

// Result of an optimizer step.
struct StepResult {
  bool updated = true;                // false: some rank found inf or NaN, and nothing was updated
  std::optional<double> grad_norm{};  // with clip_grad: the norm before clipping
  std::optional<int64_t> num_zeros{};
};

// Optimizer of which each rank runs a part. A rank owns whole parameters (OSS) or ranges of their elements
// (DistributedOptimizer, FullyShardedOptimizer), keeps their state and updates them. Its param groups are those of the
// whole model, with options as the local optimizer resolves them. Schedulers work on it, and options may change between
// steps, alike on all ranks: DisagreeError in the next step(), where options or a loaded state differ (not in elastic
// jobs, which compare rates where ranks join). state() is empty: local_optimizer().state() has what this rank updates,
// state_dict() everything. Changes of the param groups or the state through torch::optim::Optimizer&, whose functions
// are not virtual, are a UsageError in the next step().
class ShardedOptimizerBase : public torch::optim::Optimizer {
 public:
  using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;
  struct State;
  ~ShardedOptimizerBase() override;

  // Updates what this rank owns, with the gradients in grad(), and publishes it to all ranks; before, unscales the
  // gradients, checks them for inf and NaN and clips them, if the optimizer's options say so. Other ranks' gradients
  // are not read; a parameter without a gradient is unchanged. Throws UsageError if gradients accumulated under no_sync
  // have not been reduced. Collective.
  StepResult step();
  // Evaluates the closure, then steps; returns the closure's result.
  at::Tensor step(LossClosure closure) override;

  // Overrides for torch::save and torch::load. Both throw UsageError, because a rank has only its own state: use
  // shoal::save and shoal::load (shoal/checkpoint.h), or state_dict() and load_state_dict().
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
  // Both throw UsageError, which names what to do instead; OSS overrides add_param_group().
  virtual void add_param_group(const torch::optim::OptimizerParamGroup& group);
  [[noreturn]] void add_parameters(const std::vector<at::Tensor>& parameters);

  // The ranks over which the optimizer state is sharded.
  const Group& group() const;
  // The optimizer over what this rank owns, with its state.
  const torch::optim::Optimizer& local_optimizer() const;

 protected:
  // groups: param groups of the whole model. make: creates the optimizer for a rank's part of them. Collective.
  ShardedOptimizerBase(const ParamGroups& groups, std::unique_ptr<torch::optim::OptimizerOptions> defaults,
                       OptimizerFactory make, std::unique_ptr<State> state);
  // Called within a step: before the gradients are read, and before updated values are published.
  virtual void complete_gradients() {}
  virtual void end_gradients() {}
  // Called at the end of an update in an elastic job, which does not communicate.
  virtual void show_update() {}
  // True if values change, and are published, also in a step without an update.
  virtual bool moves_without_update() const { return false; }
  // step() with a loss scaler or none (nullptr) and a norm to clip to or none (0).
  StepResult step_with(GradScaler* scaler, double max_norm);
  // Divides the groups among the ranks and makes the local optimizer. Groups from index `given` on are as the caller
  // passed them: their options are resolved. Changes nothing if it throws. Collective.
  void share(ParamGroups groups, size_t given);
  // Adopts parameters that the user has replaced or written since the last step; step() calls it first. Collective.
  void adopt_changes();
  // Options that were changed, and states that were loaded since the last step, must be the same on all ranks:
  // DisagreeError. Collective if there are any.
  void agree_on_changes();
  // For Elastic: goes on in the state's group, whose ranks own other shares, with the optimizer state of the former
  // ones, after `step` steps. If it fails, the former ones count, and it may be called again. Collective over the new
  // group.
  void take_over(int64_t step);
  // Where the ranks before or after a change have second owners: all learn whose shards count, the former ones or those
  // of a change that has failed. Call it first in a change. apart: whether ranks share no parameters afterwards.
  // Collective over the ranks of the job.
  void begin_regroup(const Group& group, bool apart);
  // Then in place of take_over(), in the state's group, once what its ranks own is divided anew, without values.
  void take_over_from_owners(int64_t step);
  State& state() const { return *state_; }

  friend class ElasticAccess;  // src/elastic/access.h
  virtual void unguard();
  Group job() const;
  bool has_second_owners() const;

 private:
  void guard();
  void come_without_shards();
  void compute_shares(bool now);
  bool prepare_commit();
  void commit(bool map);
  bool update_was_refused() const;
  bool misses_update() const;
  std::optional<int64_t> updates_to_compare() const;
  bool has_replicas() const;
  void map_on_host(bool map);
  bool commit_over_hosts(bool came, const std::function<bool(bool passes)>& decide);
  void allow_update();
  void publish_update();
  std::vector<std::string> description() const;
  GradScaler* own_scaler() const;
  void visit_state(const torch::nn::Module& module,
                   const std::function<void(const std::string& name, const NamedState& state)>& visit);
  void take_state(const torch::nn::Module& module, const OptimizerState& whole);

  void update(bool finite);
  StepResult prepare_update(GradScaler* scaler, double max_norm);
  StepResult update_if_finite(GradScaler* scaler, double max_norm);
  StepResult committed_step(GradScaler* scaler, double max_norm);
  // Ranks become second owners of shards that others own, or are no longer. The first is collective.
  void enable_second_owners();
  void disable_second_owners();

  std::unique_ptr<State> state_;
};

// Sharded optimizer by ranges, created by the strategies. The set of parameters is fixed at construction.
//
// As for any libtorch optimizer, grad() decides: a parameter whose grad() is undefined is not updated, a zeroed
// gradient counts as zero, and a tensor set by hand is the gradient (all ranks must set the same). After a reduction,
// grad() is a tensor without memory that stands for the reduced gradient: all forms of zero_grad() drop or zero it; an
// operator that reads it throws a UsageError, which names the parameter and the right call. With a scaler, a second
// step or backward with the same gradients is a UsageError. 16-bit parameters are updated in float32.
class ShardedOptimizerCore : public ShardedOptimizerBase {
 public:
  struct State;
  ~ShardedOptimizerCore() override;

  // Multiplies a loss by the scaler's factor; without a scaler returns it unchanged.
  at::Tensor scale_loss(const at::Tensor& loss) const;
  const GradScaler* scaler() const;

  // Full optimizer state by parameter name, with the float32 main parameters of 16-bit ones: on rank `recipient` of the
  // group only (empty elsewhere); none: on every rank. Transfers one parameter at a time. Collective.
  OptimizerState state_dict(std::optional<int> recipient = std::nullopt) const;
  // Loads the full state, which every rank passes, from any strategy and number of ranks. See load_optimizer_state.
  void load_state_dict(const OptimizerState& state);

 protected:
  // groups: param groups of the parameters in state's modules. Collective.
  ShardedOptimizerCore(ParamGroups groups, std::unique_ptr<torch::optim::OptimizerOptions> defaults,
                       OptimizerFactory make, std::unique_ptr<State> state);
  State& state() const;
  // For Elastic. UsageError that names what cannot outlive a rank.
  void require_regroupable() const;
  // Goes on in another group, for whose ranks `modules` are made, with the values and the state of the former ones,
  // after `step` steps. job: those ranks, and those of other hosts that hold the same. See take_over(). Collective over
  // `group`.
  void regroup(const Group& group, const Group& job, std::vector<std::shared_ptr<ShardedModule>> modules, int64_t step);

 private:
  friend class ElasticAccess;
  bool has_buffered_gradient(const at::Tensor& parameter) const;
  void connect_clipping();
  void follow(const Group& group, const Group& job);
  double clip_grad_norm(double max_norm, double norm_type);
};

}  // namespace shoal
