#include "engine/buckets/spare_memory.h"

#include <algorithm>
#include <utility>

namespace shoal {

std::vector<at::Tensor>::const_iterator SpareMemory::find(int64_t numel, const at::TensorOptions& options,
                                                          int64_t fresh_numel) const {
  const auto most = std::max(fresh_numel, static_cast<int64_t>(most_times_ * static_cast<double>(numel)));
  auto best = spare_.end();
  for (auto it = spare_.begin(); it != spare_.end(); ++it) {
    const bool fits = it->scalar_type() == options.dtype().toScalarType() && it->device() == options.device() &&
                      it->numel() >= numel && it->numel() <= most;
    if (fits && (best == spare_.end() || it->numel() < best->numel())) best = it;
  }
  return best;
}

void SpareMemory::shrink(size_t most) {
  if (spare_.size() <= most) return;
  std::stable_sort(spare_.begin(), spare_.end(), [](const auto& a, const auto& b) { return a.nbytes() > b.nbytes(); });
  spare_.resize(most);
}

at::Tensor SpareMemory::take(const Group& group, int64_t numel, const at::TensorOptions& options, int64_t fresh_numel) {
  if (const auto found = find(numel, options, fresh_numel); found != spare_.end()) {
    auto memory = *found;
    spare_.erase(found);
    return memory;
  }
  // What is too small for any of them takes less memory than one, and leaves them for those that follow.
  const bool leaves = keeps_larger_ && std::all_of(spare_.begin(), spare_.end(), [&](const at::Tensor& memory) {
                        return static_cast<double>(memory.numel()) > most_times_ * static_cast<double>(numel);
                      });
  if (!leaves) spare_.clear();
  return group.allocate(std::max(numel, fresh_numel), options);
}

}  // namespace shoal
