#pragma once
// Order in which backward computes gradients.

#include <torch/nn/module.h>

#include <functional>
#include <vector>

#include "engine/buckets/bucket_plan.h"
#include "shoal/precision.h"

namespace shoal {

// Runs `loss` and its backward. Gradients that do not arrive come last, in reverse order of registration, as in a
// training. The module's gradients, its buffers and the random numbers are as before afterwards. UsageError if the loss
// is not one number with a gradient.
std::vector<size_t> arrival_order(const torch::nn::Module& module, const std::vector<Gradient>& gradients,
                                  const Precision& precision, const std::function<at::Tensor()>& loss);

}  // namespace shoal
