#pragma once
// Blockwise 8-bit integer format: integers with one scale per block.

#include <torch/types.h>

#include <cstdint>

namespace shoal {

// Rows of whole blocks, stored as bytes: [integers | scales in float32].
class Int8Format {
 public:
  Int8Format(int64_t columns, int64_t block) : columns_((columns + block - 1) / block * block), block_(block) {}

  int64_t columns() const { return columns_; }
  int64_t row_bytes() const { return columns_ + columns_ / block_ * static_cast<int64_t>(sizeof(float)); }

  // rows: [r, columns()]. A value that is not finite makes its block's scale not finite, and so the whole decoded
  // block.
  at::Tensor encode(const at::Tensor& rows) const {
    const auto blocks = rows.to(at::kFloat).reshape({rows.size(0), -1, block_});
    const auto scales = blocks.abs().amax(-1).div_(127);
    const auto inverse = at::where(scales > 0, scales.reciprocal(), at::zeros({}, scales.options()));
    const auto integers = (blocks * inverse.unsqueeze(-1)).round_().clamp_(-127, 127).nan_to_num_(0).to(at::kChar);
    return at::cat({integers.view({rows.size(0), columns_}).view(at::kByte), scales.view(at::kByte)}, 1);
  }
  // Returns [r, columns()] in float32.
  at::Tensor decode(const at::Tensor& bytes) const {
    const auto integers = bytes.narrow(1, 0, columns_).contiguous().view(at::kChar);
    const auto scales =
        bytes.narrow(1, columns_, row_bytes() - columns_).clone(at::MemoryFormat::Contiguous).view(at::kFloat);
    const auto blocks = integers.to(at::kFloat).view({bytes.size(0), -1, block_});
    return (blocks * scales.unsqueeze(-1)).view({bytes.size(0), columns_});
  }

 private:
  int64_t columns_;
  int64_t block_;
};

}  // namespace shoal
