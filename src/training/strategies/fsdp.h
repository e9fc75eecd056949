#pragma once
// FullyShardedDataParallel as a strategy, alone or with gossip between hosts.

#include "shoal/fsdp.h"
#include "training/parts.h"

namespace shoal {

// FullyShardedCore with the functions that a wrapper's forward uses.
class OpenFullyShardedCore : public OpenCore<FullyShardedCore> {
 public:
  using FullyShardedCore::input_cast;
  using FullyShardedCore::own_elements;
  using OpenCore::OpenCore;
};

class FsdpTraining : public WrappedTraining<OpenFullyShardedCore, TrainingCore> {
 public:
  using MakeOptimizer = std::function<std::unique_ptr<FullyShardedOptimizerCore>(FullyShardedCore& parallel)>;

  // group: ranks that share a model. make: makes the model's optimizer; none: the recipe's.
  FsdpTraining(const TrainingParts& parts, const Group& group, ShardingStrategy sharding,
               const MakeOptimizer& make = {});

  at::Tensor scale_loss(const at::Tensor& loss) const override { return optimizer_->scale_loss(loss); }
  bool step() override { return optimizer_->step().updated; }
  Joinable& joinable() override { return *parallel_; }
  torch::optim::Optimizer& optimizer() override { return *optimizer_; }
  std::vector<const torch::optim::Optimizer*> local_optimizers() const override {
    return {&optimizer_->local_optimizer()};
  }
  OptimizerState optimizer_state() override { return optimizer_->state_dict(); }
  std::optional<TrainingState> state() override { return TrainingState(*parallel_, *optimizer_); }
  std::vector<at::Tensor> parameters() const override;
  std::vector<at::Tensor> gradients() const override { return parallel_->own_gradients(); }
  std::shared_ptr<void> full_parameters() override;
  bool has_whole_model() const override { return parallel_->shared(); }
  TensorCast input_cast() const override { return parallel_->input_cast(); }

 protected:
  OpenFullyShardedCore& wrapper() const override { return *parallel_; }
  std::vector<Group> groups() const override { return parallel_->groups(); }

  std::unique_ptr<OpenFullyShardedCore> parallel_;
  std::unique_ptr<FullyShardedOptimizerCore> optimizer_;
};

// Policy of the option unit_numel, or the training's.
std::optional<WrapPolicy> units_of(const TrainingParts& parts);
// Param groups of the recipe; nothing: the optimizer takes all trainable parameters.
OptimizerRecipe::ParamGroups groups_of_units(const TrainingParts& parts);
FullyShardedOptimizerOptions sharded_optimizer_options(const TrainingParts& parts);
// reduce_dtype by the option grad_reduce_in_fp32, which concerns gradients of 16 bits. StrategyOptionError if others
// have 64 bits.
std::optional<at::ScalarType> reduce_dtype_of(const TrainingParts& parts);
std::vector<StrategyOption> fsdp_option_list();

}  // namespace shoal
