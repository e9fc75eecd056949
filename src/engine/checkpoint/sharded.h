#pragma once
// Base of the checkpoint sources of sharded strategies, whose optimizers update each rank's shards.

#include "engine/checkpoint/source.h"
#include "engine/sharded/sharded_optimizer_state.h"

namespace shoal {

class ShardedSource : public CheckpointSource {
 public:
  // optimizer: whose state it is, for the rates. Both outlive this object.
  ShardedSource(torch::optim::Optimizer& optimizer, ShardedOptimizerCore::State& state)
      : optimizer_(optimizer), state_(state) {}

  CheckpointView view() override;
  CarriedStates carried() override;
  void begin_load(const CarriedStates& past) override;
  void end_load(const CarriedStates& past) override;

 protected:
  // Adds what no optimizer updates.
  virtual void add_others(CheckpointView& view) = 0;

 private:
  std::vector<Reducer*> reducers() const;

  torch::optim::Optimizer& optimizer_;
  ShardedOptimizerCore::State& state_;
};

}  // namespace shoal
