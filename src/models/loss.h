#pragma once
// Loss functions of the built-in models.

#include <ATen/core/Tensor.h>

namespace shoal::models {

// Mean cross entropy over samples (and positions): logits [..., classes], int64 targets [...]. Computed in float32, or
// in the logits' dtype if that is wider.
at::Tensor loss_of(const at::Tensor& logits, const at::Tensor& targets);

}  // namespace shoal::models
