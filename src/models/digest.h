#pragma once
// Digest of a tensor in four numbers, for comparing runs of different programs.

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace shoal::models {

// In float64 over the elements in row-major order.
struct Digest {
  double sum;
  double abs_sum;
  double l2;     // root of the sum of squares
  double probe;  // sum of x[i] * unit(draw(key(0, 4, index), i)): also detects a wrong order
};

// index: place of the tensor in named_parameters() or named_buffers(). Any dtype, shape, layout and device.
Digest digest(uint64_t index, const at::Tensor& tensor);

}  // namespace shoal::models
