#pragma once
// Base of the optimizers that update only the shards owned by this rank.

#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "shoal/detail/optimizer_state.h"
#include "shoal/group.h"
#include "shoal/precision.h"

namespace shoal {

// Result of an optimizer step.
struct ShardedStep {
  bool updated = true;                // false: some rank found inf or NaN, and nothing was updated
  std::optional<double> grad_norm{};  // with clip_grad: the norm before clipping
  std::optional<int64_t> num_zeros{};
};

// Sharded optimizer, created by the strategies. Its param groups are those of the whole model, with options as the
// local optimizer resolves them. Schedulers work on it, and options may change between steps. The set of parameters is
// fixed at construction: after a change through torch::optim::Optimizer& the next step() throws UsageError.
class ShardedOptimizerCore : public torch::optim::Optimizer {
 public:
  using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;
  using Factory = std::function<std::unique_ptr<torch::optim::Optimizer>(const ParamGroups& groups)>;
  struct State;
  ~ShardedOptimizerCore() override;

  // Multiplies a loss by the scaler's factor; without a scaler returns it unchanged.
  at::Tensor scale_loss(const at::Tensor& loss) const;
  // Unscales the gradients, checks them for inf and NaN, clips them, updates this rank's shards in float32 and
  // publishes them to all ranks. Collective.
  //
  // As for any libtorch optimizer, grad() decides: a parameter whose grad() is undefined is not updated, a zeroed
  // gradient counts as zero, and a tensor set by hand is the gradient (all ranks must set the same). After a reduction,
  // grad() is a tensor without memory that stands for the reduced gradient: all forms of zero_grad() drop or zero it;
  // an operator that reads it throws a UsageError, which names the parameter and the right call. Throws UsageError if
  // gradients accumulated under no_sync have not been reduced, and, with a scaler, for a second step or backward with
  // the same gradients.
  ShardedStep step();
  at::Tensor step(LossClosure closure) override;

  // Full optimizer state by parameter name, with the float32 main parameters of 16-bit ones: on rank `recipient` of the
  // group only (empty elsewhere); none: on every rank. Transfers one parameter at a time. Collective.
  OptimizerState state_dict(std::optional<int> recipient = std::nullopt) const;
  // Loads the full state, which every rank passes, from any strategy and number of ranks. See load_optimizer_state.
  void load_state_dict(const OptimizerState& state);
  // Overrides for torch::save and torch::load. Both throw UsageError, because a rank has only its own shards: use
  // shoal::save and shoal::load (shoal/checkpoint.h), or state_dict() and load_state_dict().
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
  // Both throw UsageError, which names the reason for each parameter: shards are laid out at construction.
  [[noreturn]] void add_param_group(const torch::optim::OptimizerParamGroup& group);
  [[noreturn]] void add_parameters(const std::vector<at::Tensor>& parameters);
  const GradScaler* scaler() const;
  // The ranks over which the optimizer state is sharded.
  const Group& group() const;
  // The optimizer over this rank's shards, with its state.
  const torch::optim::Optimizer& local_optimizer() const;

 protected:
  // groups: param groups of the parameters in state's modules. make: creates the optimizer for this rank's shards.
  // Collective.
  ShardedOptimizerCore(ParamGroups groups, std::unique_ptr<torch::optim::OptimizerOptions> defaults,
                       const Factory& make, std::unique_ptr<State> state);
  // Called within a step: before the gradients are read, and before updated shards are published.
  virtual void complete_gradients() {}
  virtual void end_gradients() {}
  // True if shards change, and are published, also in a step without an update.
  virtual bool moves_without_update() const { return false; }
  // Checks grad() before a step, see step(). Changes nothing if it throws.
  void prepare_gradients();
  // Publishes this rank's shards to all ranks.
  void publish();
  // Adopts parameters that the user has replaced or written since the last step; step() calls it first. Collective.
  void adopt_changes() const;
  State& state() const { return *state_; }

 private:
  void collect_gradients();
  double clip_grad_norm(double max_norm, double norm_type);
  ParamGroups shares_of(const ParamGroups& groups) const;
  bool anywhere(bool here, const char* what) const;
  ShardedStep update_if_finite();
  void update(bool finite);

  std::unique_ptr<State> state_;
};

}  // namespace shoal
