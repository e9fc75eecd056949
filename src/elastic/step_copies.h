#pragma once
// Copies of what a step changes before its update, to undo it.

#include <torch/nn/module.h>

#include <vector>

namespace shoal {

// The module's buffers and the state of the CPU's random generator, as they were when a step began. A module may
// replace a buffer by another tensor of its shape at any time.
class StepCopies {
 public:
  // module: must outlive this object.
  explicit StepCopies(const torch::nn::Module& module);

  // Copies what there is now.
  void take();
  // Restores what was taken.
  void restore() const;

  // Restores the buffers alone.
  void restore_buffers() const;
  // Copies of the present buffers, and their way back.
  std::vector<at::Tensor> present_buffers() const;
  void set_buffers(const std::vector<at::Tensor>& values) const;

 private:
  const torch::nn::Module& module_;
  std::vector<at::Tensor> copies_;
  at::Tensor generator_;
};

}  // namespace shoal
