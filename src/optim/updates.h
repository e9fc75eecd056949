#pragma once
// Pending updates of an optimizer step, checked before anything changes.

#include <torch/optim/optimizer.h>

#include <string>
#include <vector>

namespace shoal {

// A parameter that has a gradient in this step; the gradient in the parameter's dtype.
struct Update {
  at::Tensor parameter, gradient;
};

// The closure's loss, computed with gradients recorded; undefined without a closure.
at::Tensor evaluate(const torch::optim::Optimizer::LossClosure& closure);

// One list per parameter group. UsageError, which names `optimizer`, for a gradient that is sparse, and for a parameter
// that is not floating point.
std::vector<std::vector<Update>> collect_updates(const torch::optim::Optimizer& of, const std::string& optimizer);

// The same for kernels that walk a parameter's tensors side by side, element by element in memory: a gradient with
// other strides comes as a copy with the parameter's; UsageError for a parameter with gaps in memory.
std::vector<std::vector<Update>> collect_aligned_updates(const torch::optim::Optimizer& of,
                                                         const std::string& optimizer);

// A tensor of the state, for the same kernels. One that does not lie as the parameter does is replaced by a copy that
// does: a checkpoint may bring other strides, and Module::to changes the parameter's dtype and device alone.
at::Tensor aligned(at::Tensor& state, const at::Tensor& parameter);

}  // namespace shoal
