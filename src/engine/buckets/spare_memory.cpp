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

}  // namespace shoal
