#include "engine/buckets/spare_memory.h"

#include <algorithm>
#include <utility>

namespace shoal {

at::Tensor SpareMemory::take(const Group& group, int64_t numel, const at::TensorOptions& options) {
  // Not much larger than needed, because a larger buffer is soon needed by a larger bucket.
  const auto fits = std::find_if(spare_.begin(), spare_.end(), [&](const at::Tensor& memory) {
    return memory.scalar_type() == options.dtype().toScalarType() && memory.device() == options.device() &&
           memory.numel() >= numel && memory.numel() <= numel + numel / 4;
  });
  if (fits != spare_.end()) {
    auto memory = std::move(*fits);
    spare_.erase(fits);
    return memory;
  }
  spare_.clear();
  return group.allocate(numel, options);
}

void SpareMemory::shrink(size_t most, int64_t most_bytes) {
  shrink(most);
  int64_t bytes = 0;
  std::erase_if(spare_, [&](const at::Tensor& memory) {
    const auto own = static_cast<int64_t>(memory.nbytes());
    const bool too_many = bytes + own > most_bytes;
    if (!too_many) bytes += own;
    return too_many;
  });
}

}  // namespace shoal
