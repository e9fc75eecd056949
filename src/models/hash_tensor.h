#pragma once
// Tensors of hash streams.

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace shoal::models {

// unit(draw(k, i)) for i = 0 .. count - 1; float32 [count] on the CPU.
at::Tensor unit_tensor(uint64_t k, int64_t count);

}  // namespace shoal::models
