#include "engine/buckets/spare_memory.h"

#include <algorithm>
#include <utility>

namespace shoal {

std::vector<at::Tensor>::const_iterator SpareMemory::find(int64_t numel, const at::TensorOptions& options) const {
  // Not much larger than needed, because a larger buffer is soon needed by a larger bucket.
  return std::find_if(spare_.begin(), spare_.end(), [&](const at::Tensor& memory) {
    return memory.scalar_type() == options.dtype().toScalarType() && memory.device() == options.device() &&
           memory.numel() >= numel && memory.numel() <= numel + numel / 4;
  });
}

at::Tensor SpareMemory::take(const Group& group, int64_t numel, const at::TensorOptions& options) {
  if (const auto found = find(numel, options); found != spare_.end()) {
    auto memory = *found;
    spare_.erase(found);
    return memory;
  }
  spare_.clear();
  return group.allocate(numel, options);
}

}  // namespace shoal
