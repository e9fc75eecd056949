#pragma once
// Slice of a named tensor: the form in which every strategy passes its state to a checkpoint.

#include <torch/types.h>

#include <string>
#include <vector>

#include "shoal/detail/range.h"

namespace shoal {

// Elements of the tensor are counted from 0 with the dimensions in `order`, slowest first; empty: row-major. Other
// orders serve tensors that are cut as they lie in memory: [0, 2, 3, 1] for channels-last weights.
struct NamedSlice {
  std::string name;            // name of the tensor, unique in a checkpoint
  std::vector<int64_t> shape;  // of the whole tensor; [] for a scalar
  Range range;                 // elements in this slice
  // range.size() elements, row-major in this tensor's own shape, with any strides. Flat, or for a whole tensor in
  // row-major order also of its shape. Borrowed while a save runs; an asynchronous save copies it.
  at::Tensor values;
  std::vector<int64_t> order{};
  // Selects one of a rank's files. "model" is for parameters and buffers, and is what an export contains.
  std::string part = "model";
};

// Whole tensor as one slice.
inline NamedSlice whole_slice(std::string name, const at::Tensor& tensor, std::string part = "model") {
  return {.name = std::move(name),
          .shape = tensor.sizes().vec(),
          .range = {0, tensor.numel()},
          .values = tensor,
          .order = {},
          .part = std::move(part)};
}

}  // namespace shoal
