#pragma once
// Memory of buckets or pages that have come back, for those that follow: fresh memory costs more than a copy.

#include <torch/types.h>

#include <algorithm>
#include <vector>

#include "shoal/group.h"

namespace shoal {

class SpareMemory {
 public:
  // [numel]; the values are what was there before. When nothing fits, what is spare goes first, so that more is never
  // held than was in use at once.
  at::Tensor take(const Group& group, int64_t numel, const at::TensorOptions& options);
  void put(at::Tensor memory) { spare_.push_back(std::move(memory)); }
  // Keeps so many at most.
  void shrink(size_t most) { spare_.resize(std::min(spare_.size(), most)); }
  void clear() { spare_.clear(); }

 private:
  std::vector<at::Tensor> spare_;
};

}  // namespace shoal
