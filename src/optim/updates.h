#pragma once
// Updates of an optimizer step, validated before anything changes.

#include <torch/optim/optimizer.h>

#include <string>
#include <vector>

namespace shoal {

// A parameter that has a gradient in this step; the gradient is in the parameter's dtype.
struct Update {
  at::Tensor parameter, gradient;
};

// Runs the closure in grad mode and returns its loss; undefined without a closure.
at::Tensor evaluate(const torch::optim::Optimizer::LossClosure& closure);

// One list per param group. UsageError, which names `optimizer`, for a sparse gradient, and for a parameter that is not
// floating-point.
std::vector<std::vector<Update>> collect_updates(const torch::optim::Optimizer& of, const std::string& optimizer);

// Updates that one kernel call may make in any order: no parameter comes twice.
struct UpdateRun {
  size_t group;  // of the optimizer's param groups
  std::vector<Update> updates;
};

// The same for kernels that walk a parameter's tensors side by side in memory: a gradient with other strides is copied
// to the parameter's; UsageError for a parameter with gaps in memory. To be made in this order; where a group lists a
// parameter again, which libtorch then updates again, another run of the group begins.
std::vector<UpdateRun> collect_aligned_updates(const torch::optim::Optimizer& of, const std::string& optimizer);

// UsageError, before anything has changed, for a state tensor with another shape than its parameter's, as a checkpoint
// of another model brings it: the kernels would read and write past its end. An undefined one fits.
void require_shape(const at::Tensor& state, const char* what, const at::Tensor& parameter,
                   const std::string& optimizer);

// UsageError, before anything has changed, for a state tensor that is not there or has another shape.
void require_state(const at::Tensor& state, const char* what, at::IntArrayRef shape, const at::Tensor& parameter,
                   const std::string& optimizer);

// A state tensor for the same kernels, of the parameter's shape. One with another layout than the parameter's is
// replaced by a copy: a checkpoint may bring other strides, and Module::to changes dtype and device of the parameter
// only.
at::Tensor aligned(at::Tensor& state, const at::Tensor& parameter);

}  // namespace shoal
