#pragma once
// Checkpoint source of FullyShardedDataParallel.

#include "engine/checkpoint/sharded.h"
#include "strategy/fsdp/shards.h"

namespace shoal {

class FullyShardedSource : public ShardedSource {
 public:
  FullyShardedSource(FullyShardedCore& parallel, FullyShardedCore::Shards& shards, torch::optim::Optimizer& optimizer,
                     ShardedOptimizerCore::State& state)
      : ShardedSource(optimizer, state), parallel_(parallel), shards_(shards) {}

  std::string strategy() const override;
  Group group() override { return shards_.groups.all; }
  void end_load(const CarriedStates& past) override;
  void require_own_values() const override;

 private:
  void add_others(CheckpointView& view) override;
  void give_buffers_their_dtypes(CheckpointView& view);
  bool is_ignored(const std::string& name) const;
  bool is_sharded_here(const std::string& name) const;

  FullyShardedCore& parallel_;
  FullyShardedCore::Shards& shards_;
  // Buffers, and the converted copies that the view holds instead.
  std::vector<std::pair<at::Tensor, at::Tensor>> converted_;
};

}  // namespace shoal
