#pragma once
// Spare buffers of buckets or pages, for reuse: fresh memory costs more than a copy.

#include <torch/types.h>

#include <algorithm>
#include <vector>

#include "shoal/group.h"

namespace shoal {

class SpareMemory {
 public:
  // Returns [numel] with stale values. If nothing fits, frees all spare buffers before it allocates, so that memory
  // never exceeds what was in use at once.
  at::Tensor take(const Group& group, int64_t numel, const at::TensorOptions& options);
  // Whether take() would return a spare buffer.
  bool fits(int64_t numel, const at::TensorOptions& options) const { return find(numel, options) != spare_.end(); }
  void put(at::Tensor memory) { spare_.push_back(std::move(memory)); }
  // Keeps at most `most` buffers.
  void shrink(size_t most) { spare_.resize(std::min(spare_.size(), most)); }
  void clear() { spare_.clear(); }

 private:
  std::vector<at::Tensor>::const_iterator find(int64_t numel, const at::TensorOptions& options) const;

  std::vector<at::Tensor> spare_;
};

}  // namespace shoal
