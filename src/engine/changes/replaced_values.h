#pragma once
// Copies of the values of a parameter that the program has given other memory, as they lie in its home.

#include <torch/types.h>

#include "memory/views.h"
#include "shoal/detail/range.h"

namespace shoal {

// A tensor like `home` with the parameter's values, in the parameter's dtype.
inline at::Tensor copy_like(const at::Tensor& home, const at::Tensor& parameter) {
  return at::empty_strided(home.sizes(), home.strides(), parameter.options().requires_grad(false)).copy_(parameter);
}

// A range of them, in memory order.
inline at::Tensor copied_elements(const at::Tensor& home, const at::Tensor& parameter, const Range& elements) {
  return in_memory_order(copy_like(home, parameter)).narrow(0, elements.begin, elements.size());
}

}  // namespace shoal
