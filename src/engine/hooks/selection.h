#pragma once
// Selected elements of a flat tensor, with their positions.

#include <torch/types.h>

#include <cstdint>

namespace shoal {

// Selected elements of a bucket, packed as [values | padding | positions | padding], of which each part begins where
// its dtype can be read; of one size on all ranks.
struct Selection {
  at::Tensor values;     // [k], in the bucket's dtype
  at::Tensor positions;  // [k], int32

  at::Tensor packed() const {
    const auto padded = [](const at::Tensor& part) {
      const auto bytes = part.view(at::kByte);
      return at::constant_pad_nd(bytes, {0, whole_words(bytes.numel()) - bytes.numel()});
    };
    return at::cat({padded(values), padded(positions)});
  }
  static Selection unpack(const at::Tensor& packed, int64_t count, at::ScalarType dtype) {
    const auto bytes = count * static_cast<int64_t>(c10::elementSize(dtype));
    const auto index_bytes = count * static_cast<int64_t>(sizeof(int32_t));
    return {packed.narrow(0, 0, bytes).view(dtype), packed.narrow(0, whole_words(bytes), index_bytes).view(at::kInt)};
  }

 private:
  static int64_t whole_words(int64_t bytes) { return (bytes + 7) / 8 * 8; }
};

}  // namespace shoal
