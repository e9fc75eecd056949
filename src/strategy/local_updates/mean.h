#pragma once
// The mean over ranks of some tensors.

#include <functional>
#include <vector>

#include "shoal/group.h"

namespace shoal {

// On its way: one all-reduce per dtype and device. Move-only.
class Mean {
 public:
  Mean() = default;
  // `dtypes`: on the wire. write(i, out) puts this rank's i-th value into `out`, a tensor of the shape of likes[i].
  Mean(const Group& group, const std::vector<at::Tensor>& likes, const std::vector<at::ScalarType>& dtypes,
       const std::function<void(size_t, at::Tensor&)>& write, const Label& label);
  // One that is there already.
  explicit Mean(std::vector<at::Tensor> values) : values_(std::move(values)) {}

  bool empty() const { return values_.empty(); }
  // In the dtypes of the wire. Blocks until they are there.
  const std::vector<at::Tensor>& wait();

 private:
  std::vector<at::Tensor> values_;
  std::vector<Work> works_;
};

// At least float32: values of 16 bits are no place to collect small changes in.
inline at::ScalarType widened(at::ScalarType dtype) {
  return at::promote_types(dtype, at::kFloat);
}

}  // namespace shoal
