#pragma once
// Sizes of ShardedDataParallel's buckets.

#include <algorithm>

#include "engine/reducer/gradient_reduction.h"
#include "shoal/zero.h"

namespace shoal {

// owners: ranks that keep sums, of each host if hosts have all of them. A lone rank keeps everything: its gradients are
// not grouped. small: ranks share memory and no hook sums the buckets.
inline BucketCaps sharded_bucket_caps(const std::vector<Gradient>& gradients, const ShardedDataParallelOptions& options,
                                      int owners, bool lone, bool small) {
  int64_t numel = 0;
  int64_t element_bytes = 1;
  for (const auto& gradient : gradients) {
    numel += gradient.parameter.numel();
    element_bytes = std::max<int64_t>(element_bytes, static_cast<int64_t>(c10::elementSize(gradient.dtype())));
  }
  const auto most = small ? std::min(options.reduce_buffer_size, max_transient_bucket_bytes / element_bytes)
                          : options.reduce_buffer_size;
  const auto with_bias = small ? std::min(options.reduce_buffer_size, most / 4 * 5) : most;
  constexpr int64_t buckets_per_owner = 4;
  const auto cap = lone ? 1 : std::clamp<int64_t>(numel / (buckets_per_owner * owners), 1, most);
  return {.first_bytes = cap * element_bytes, .bytes = cap * element_bytes, .most_numel = with_bias};
}

}  // namespace shoal
