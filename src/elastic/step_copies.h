#pragma once
// Copies of what a step changes before its update, to undo it.

#include <torch/nn/module.h>

#include <vector>

namespace shoal {

// The module's buffers and the state of the CPU's random generator, as they were when a step began.
class StepCopies {
 public:
  explicit StepCopies(const torch::nn::Module& module);

  // Copies what there is now.
  void take();
  // Restores what was taken.
  void restore() const;

 private:
  std::vector<at::Tensor> buffers_;
  std::vector<at::Tensor> copies_;
  at::Tensor generator_;
};

}  // namespace shoal
