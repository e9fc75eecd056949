#pragma once
// Selected elements of a flat tensor, with their positions.

#include <torch/types.h>

#include <cstdint>

namespace shoal {

// Selected elements of a bucket, packed as [values | positions | padding to 8 bytes]; of one size on all ranks.
struct Selection {
  at::Tensor values;     // [k], in the bucket's dtype
  at::Tensor positions;  // [k], int32

  at::Tensor packed() const {
    const auto bytes = static_cast<int64_t>(values.nbytes() + positions.nbytes());
    const auto padding = at::zeros({(8 - bytes % 8) % 8}, values.options().dtype(at::kByte));
    return at::cat({values.view(at::kByte), positions.view(at::kByte), padding});
  }
  static Selection unpack(const at::Tensor& packed, int64_t count, at::ScalarType dtype) {
    const auto bytes = count * static_cast<int64_t>(c10::elementSize(dtype));
    const auto index_bytes = count * static_cast<int64_t>(sizeof(int32_t));
    return {packed.narrow(0, 0, bytes).view(dtype), packed.narrow(0, bytes, index_bytes).view(at::kInt)};
  }
};

}  // namespace shoal
