#pragma once
// Base class of checkpoint sources for sharded strategies, whose optimizers update each rank's shards.

#include "engine/checkpoint/source.h"
#include "engine/sharded/sharded_ranges.h"

namespace shoal {

class ShardedSource : public CheckpointSource {
 public:
  // optimizer: the one whose state this is, for its learning rates. Both must outlive this object.
  ShardedSource(torch::optim::Optimizer& optimizer, ShardedOptimizerCore::State& state)
      : optimizer_(optimizer), state_(state) {}

  void adopt_changes() override;
  void begin_save() override;
  CheckpointView view() override;
  CarriedStates carried() override;
  void begin_load(const CarriedStates& past) override;
  void end_load(const CarriedStates& past) override;

 protected:
  // Adds tensors that no optimizer updates, or that another one does.
  virtual void add_others(CheckpointView& view) = 0;
  // Modules of which a load writes parameters.
  virtual std::vector<std::shared_ptr<ShardedModule>> modules() const { return state_.modules; }

 private:
  std::vector<Reducer*> reducers() const;

  torch::optim::Optimizer& optimizer_;
  ShardedOptimizerCore::State& state_;
};

}  // namespace shoal
