// DistributedOptimizer in checkpoints.

#include "engine/checkpoint/sharded.h"
#include "strategy/megatron/chunk_names.h"
#include "strategy/megatron/reduction.h"

namespace shoal {
namespace {

class MegatronSource : public ShardedSource {
 public:
  MegatronSource(DistributedOptimizerCore& optimizer, ShardedOptimizerCore::State& state,
                 DistributedOptimizerCore::Modules modules)
      : ShardedSource(optimizer, state), group_(optimizer.group()), modules_(std::move(modules)) {}

  std::string strategy() const override { return "megatron"; }
  Group group() override { return group_; }

 private:
  void add_others(CheckpointView& view) override {
    for (size_t number = 0; number < modules_.size(); ++number) {
      add_rest(view, *modules_[number], chunk_prefix(modules_, number));
    }
  }

  const Group& group_;  // the optimizer's present one
  DistributedOptimizerCore::Modules modules_;
};

}  // namespace

std::shared_ptr<CheckpointSource> checkpoint_source(DistributedOptimizerCore& optimizer) {
  return std::make_shared<MegatronSource>(optimizer, optimizer.state(), optimizer.reduction_->modules);
}

}  // namespace shoal
