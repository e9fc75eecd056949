// FullyShardedDataParallel in checkpoints.

#include <torch/utils.h>

#include "engine/checkpoint/names.h"
#include "engine/checkpoint/sharded.h"
#include "strategy/fsdp/shards.h"

namespace shoal {
namespace {

std::string name_of(ShardingStrategy strategy) {
  switch (strategy) {
    case ShardingStrategy::full_shard:
      return "fsdp";
    case ShardingStrategy::shard_grad_op:
      return "fsdp_grad_op";
    case ShardingStrategy::no_shard:
      return "fsdp_no_shard";
    case ShardingStrategy::hybrid_shard:
      return "hybrid";
    case ShardingStrategy::hybrid_shard_grad_op:
      return "hybrid_grad_op";
  }
  return "fsdp";
}

class FullyShardedSource : public ShardedSource {
 public:
  FullyShardedSource(FullyShardedCore& parallel, FullyShardedCore::Shards& shards, torch::optim::Optimizer& optimizer,
                     ShardedOptimizerCore::State& state)
      : ShardedSource(optimizer, state), parallel_(parallel), shards_(shards) {}

  std::string strategy() const override { return name_of(shards_.options.sharding_strategy); }
  Group group() override { return shards_.groups.all; }

  void end_load(const nlohmann::json& own) override {
    const torch::NoGradGuard no_grad;
    ShardedSource::end_load(own);
    const Label label{-1, -1, "loaded parameters"};
    for (const auto& frozen : shards_.frozen) frozen.gather->publish(label);
    for (const auto& frozen : shards_.frozen) frozen.gather->wait(label);
  }

 private:
  // Frozen parameters are divided, too; what the wrapper was told to ignore is whole on every rank.
  void add_others(CheckpointView& view) override {
    add_rest(view, *parallel_.module());
    std::erase_if(view.rest, [&](const NamedSlice& slice) { return is_divided_here(slice.name); });
    const int rank = shards_.groups.shard.rank();
    for (const auto& frozen : shards_.frozen) {
      // Every rank knows of all of them.
      for (const auto& entry : frozen.parameters) {
        view.rest.push_back(slice_of(entry, {}, at::empty({0}, entry.tensor.scalar_type())));
      }
      for (const auto& slice : frozen.layout.overlapping(frozen.layout.part(rank))) {
        const auto& entry = frozen.parameters[slice.piece];
        view.rest.push_back(slice_of(entry, slice.in_piece, frozen.gather->elements(slice)));
      }
    }
  }

  static NamedSlice slice_of(const NamedTensor& entry, const Range& range, at::Tensor values) {
    return {.name = entry.name,
            .shape = entry.tensor.sizes().vec(),
            .range = range,
            .values = std::move(values),
            .order = memory_order(entry.tensor)};
  }

  bool is_divided_here(const std::string& name) const {
    for (const auto& frozen : shards_.frozen) {
      for (const auto& entry : frozen.parameters) {
        if (entry.name == name) return true;
      }
    }
    return false;
  }

  FullyShardedCore& parallel_;
  FullyShardedCore::Shards& shards_;
};

}  // namespace

std::shared_ptr<CheckpointSource> checkpoint_source(FullyShardedCore& parallel, FullyShardedOptimizerCore& optimizer) {
  return std::make_shared<FullyShardedSource>(parallel, *parallel.shards_, optimizer, optimizer.state());
}

}  // namespace shoal
