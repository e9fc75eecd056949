// DistributedOptimizer in checkpoints.

#include "engine/checkpoint/sharded.h"
#include "strategy/megatron/chunk_names.h"
#include "strategy/megatron/reduction.h"

namespace shoal {
namespace {

class MegatronSource : public ShardedSource {
 public:
  MegatronSource(DistributedOptimizerCore& optimizer, ShardedOptimizerCore::State& state,
                 DistributedOptimizerCore::Modules modules, std::vector<std::vector<std::string>> ignored)
      : ShardedSource(optimizer, state),
        group_(optimizer.group()),
        modules_(std::move(modules)),
        ignored_(std::move(ignored)) {}

  std::string strategy() const override { return "megatron"; }
  Group group() override { return group_; }

 private:
  void add_others(CheckpointView& view) override {
    for (size_t number = 0; number < modules_.size(); ++number) {
      const auto prefix = chunk_prefix(modules_, number);
      add_ignored(view, *modules_[number], walk(*modules_[number], ignored_[number]), prefix);
      add_rest(view, *modules_[number], prefix);
    }
  }

  const Group& group_;  // the optimizer's present one
  DistributedOptimizerCore::Modules modules_;
  std::vector<std::vector<std::string>> ignored_;  // by module
};

}  // namespace

std::shared_ptr<CheckpointSource> checkpoint_source(DistributedOptimizerCore& optimizer) {
  return std::make_shared<MegatronSource>(optimizer, optimizer.state(), optimizer.reduction_->modules,
                                          optimizer.reduction_->ignored);
}

}  // namespace shoal
