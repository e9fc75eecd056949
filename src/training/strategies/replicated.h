#pragma once
// Every rank updates everything, with gradients of its own or of all.

#include "training/parts.h"

namespace shoal {

class ReplicatedTraining : public ScaledTraining {
 public:
  explicit ReplicatedTraining(const TrainingParts& parts);

  // Where every rank has the same gradients, all of them find the same.
  bool step() override;
  torch::optim::Optimizer& optimizer() override { return *optimizer_; }
  std::vector<const torch::optim::Optimizer*> local_optimizers() const override { return {optimizer_.get()}; }
  OptimizerState optimizer_state() override;
  std::optional<TrainingState> state() override;

 protected:
  // With gradients that are finite, or not.
  virtual void update(bool finite) {
    if (finite) optimizer_->step();
  }

  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

}  // namespace shoal
