#pragma once
// Spare buffers of buckets or pages, for reuse: fresh memory costs more than a copy.

#include <torch/types.h>

#include <algorithm>
#include <vector>

#include "shoal/group.h"

namespace shoal {

class SpareMemory {
 public:
  // most_times: a spare buffer may be so many times as large as what is needed. A larger one is soon needed by a larger
  // bucket or page; but where sizes alternate, too small a number makes all memory fresh. keeps_larger: if all spare
  // buffers are larger still, they stay when memory is allocated; otherwise they are freed.
  explicit SpareMemory(double most_times = 1.25, bool keeps_larger = false)
      : most_times_(most_times), keeps_larger_(keeps_larger) {}

  // Returns at least [numel] with stale values, the smallest buffer that fits, which one of `fresh_numel` elements does
  // too. If nothing fits, frees all spare buffers before it allocates `fresh_numel` (0: numel), so that memory does not
  // exceed what was in use at once (but for keeps_larger).
  at::Tensor take(const Group& group, int64_t numel, const at::TensorOptions& options, int64_t fresh_numel = 0);
  // Whether take() would return a spare buffer.
  bool fits(int64_t numel, const at::TensorOptions& options, int64_t fresh_numel = 0) const {
    return find(numel, options, fresh_numel) != spare_.end();
  }
  void put(at::Tensor memory) { spare_.push_back(std::move(memory)); }
  // Keeps at most `most` buffers, the largest.
  void shrink(size_t most);
  void clear() { spare_.clear(); }

 private:
  std::vector<at::Tensor>::const_iterator find(int64_t numel, const at::TensorOptions& options,
                                               int64_t fresh_numel) const;

  double most_times_;
  bool keeps_larger_;
  std::vector<at::Tensor> spare_{};
};

}  // namespace shoal
