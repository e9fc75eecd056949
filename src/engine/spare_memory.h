#pragma once
// Memory of buckets that have come back, for those that leave after them: fresh pages cost more than a copy.

#include <torch/types.h>

#include <vector>

#include "shoal/comm/group.h"

namespace shoal {

class SpareMemory {
 public:
  // [numel]; the values are what was there before. When nothing fits, what is spare goes first, so that more is never
  // held than was in use at once.
  at::Tensor take(const Group& group, int64_t numel, const at::TensorOptions& options);
  void put(at::Tensor memory) { spare_.push_back(std::move(memory)); }
  void clear() { spare_.clear(); }

 private:
  std::vector<at::Tensor> spare_;
};

}  // namespace shoal
