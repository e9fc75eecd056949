#pragma once
// Slice of a named tensor: the form in which every strategy passes its state to a checkpoint.

#include <torch/types.h>

#include <string>
#include <vector>

#include "shoal/detail/range.h"

namespace shoal {

// Elements of a whole tensor are counted from 0 with the dimensions in `order`, the slowest first; empty: row-major.
// Another order serves tensors that are cut as they lie in memory: [0, 2, 3, 1] for channels-last weights.
struct NamedSlice {
  std::string name;            // of the tensor: unique in a checkpoint
  std::vector<int64_t> shape;  // of the whole tensor; [] for a scalar
  Range range;                 // elements that this slice holds
  // range.size() elements, row-major in its own shape whatever its strides. Of the whole tensor in row-major order: of
  // its shape or flat; else flat. Borrowed while a save runs; an asynchronous one copies it.
  at::Tensor values;
  std::vector<int64_t> order{};
  // Which of a rank's files it goes to. "model": parameters and buffers, what an export takes.
  std::string part = "model";
};

// A tensor as one slice.
inline NamedSlice whole_slice(std::string name, const at::Tensor& tensor, std::string part = "model") {
  return {.name = std::move(name),
          .shape = tensor.sizes().vec(),
          .range = {0, tensor.numel()},
          .values = tensor,
          .order = {},
          .part = std::move(part)};
}

}  // namespace shoal
