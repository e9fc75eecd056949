#pragma once
// Checkpoint source of FullyShardedDataParallel.

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/checkpoint/sharded.h"
#include "strategy/fsdp/shards.h"

namespace shoal {

class FullyShardedSource : public ShardedSource {
 public:
  using Shards = FullyShardedCore::Shards;
  using ShardsOf = Shards& (*)(FullyShardedCore& wrapper);

  // shards_of: for wrappers of sub-modules, whose parameters belong to the model, too; nullptr: they are taken as each
  // rank's own.
  FullyShardedSource(FullyShardedCore& parallel, Shards& shards, torch::optim::Optimizer& optimizer,
                     ShardedOptimizerCore::State& state, ShardsOf shards_of = nullptr)
      : ShardedSource(optimizer, state), parallel_(parallel), shards_(shards), shards_of_(shards_of) {}

  std::string strategy() const override;
  Group group() override { return shards_.groups.all; }
  void end_load(const CarriedStates& past) override;
  void require_own_values() const override;

 private:
  void add_others(CheckpointView& view) override;
  std::vector<std::shared_ptr<ShardedModule>> modules() const override;
  std::vector<Shards*> shards_within() const;
  void give_buffers_their_dtypes(CheckpointView& view);
  bool is_ignored(const std::string& name) const;

  FullyShardedCore& parallel_;
  Shards& shards_;
  ShardsOf shards_of_;
  // Buffers, and the converted copies that the view holds instead.
  std::vector<std::pair<at::Tensor, at::Tensor>> converted_;
};

}  // namespace shoal
