#pragma once
// Mean of tensors over ranks.

#include <functional>
#include <vector>

#include "shoal/group.h"

namespace shoal {

// Mean in flight: one all-reduce per dtype and device. Move-only.
class Mean {
 public:
  Mean() = default;
  // dtypes: dtypes of the all-reduces. write(i, out) writes this rank's i-th value to `out`, a tensor of the shape of
  // likes[i].
  Mean(const Group& group, const std::vector<at::Tensor>& likes, const std::vector<at::ScalarType>& dtypes,
       const std::function<void(size_t, at::Tensor&)>& write, const Label& label);
  // A mean whose values are already known.
  explicit Mean(std::vector<at::Tensor> values) : values_(std::move(values)) {}

  bool empty() const { return values_.empty(); }
  // Waits for the means and returns them in the dtypes of the all-reduces.
  const std::vector<at::Tensor>& wait();

 private:
  std::vector<at::Tensor> values_;
  std::vector<Work> works_;
};

// At least float32, because 16-bit values cannot accumulate small changes.
inline at::ScalarType widened(at::ScalarType dtype) {
  return at::promote_types(dtype, at::kFloat);
}

}  // namespace shoal
