#pragma once
// Sizes of DistributedOptimizer's buffers.

#include <algorithm>
#include <limits>

#include "engine/reducer/gradient_reduction.h"
#include "shoal/megatron.h"

namespace shoal {

// Without overlap there is one bucket of each dtype.
inline BucketCaps buffer_caps(const std::vector<Gradient>& gradients, const DistributedOptimizerOptions& options) {
  constexpr auto unlimited = std::numeric_limits<int64_t>::max();
  if (!options.overlap_grad_reduce) return {.first_bytes = unlimited, .bytes = unlimited};
  int64_t element_bytes = 1;
  for (const auto& gradient : gradients) {
    element_bytes = std::max(element_bytes, static_cast<int64_t>(c10::elementSize(gradient.dtype())));
  }
  const auto cap = std::min(options.bucket_size, unlimited / element_bytes) * element_bytes;
  return {.first_bytes = cap, .bytes = cap};
}

}  // namespace shoal
