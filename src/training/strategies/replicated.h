#pragma once
// Base of strategies in which every rank updates all parameters, with its own gradients or with those of all ranks.

#include "training/parts.h"

namespace shoal {

class ReplicatedTraining : public ScaledTraining {
 public:
  explicit ReplicatedTraining(const TrainingParts& parts);

  // If ranks have the same gradients, all of them find the same overflow.
  bool step() override;
  torch::optim::Optimizer& optimizer() override { return *optimizer_; }
  std::vector<at::Tensor> gradients() const override;
  std::vector<const torch::optim::Optimizer*> local_optimizers() const override { return {optimizer_.get()}; }
  OptimizerState optimizer_state() override;
  std::optional<TrainingState> state() override;

 protected:
  // finite: whether gradients are finite.
  virtual void update(bool finite) {
    const TimedScope scope(timeline_of(group_), "update");
    if (finite) optimizer_->step();
  }

  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

}  // namespace shoal
