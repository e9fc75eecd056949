#pragma once
// Several tensors in one collective, and sums of sparse gradients.

#include <chrono>
#include <cstdint>
#include <optional>
#include <vector>

#include "shoal/group.h"

namespace shoal {

// Partition of tensors into chunks of one dtype and device of at most `chunk_bytes` each. A larger tensor is a chunk of
// its own.
std::vector<std::vector<at::Tensor>> coalesced(std::vector<at::Tensor> tensors, int64_t chunk_bytes = 250LL << 20);

// Weighted all-reduce of a sparse COO gradient: the sum of the values and the sum of the weights. A rank without a
// gradient passes an undefined tensor, and one whose gradient is dense, as that of a tied embedding, the dense one,
// which counts as one of one sparse dimension. Sizes, dtype and number of sparse dimensions are equal on all ranks
// (DisagreeError). timeout: of each of its operations; default: the group's. Transfers the non-zero rows only. Blocks.
// Collective.
struct SparseSum {
  // Coalesced, or dense if a rank passed a dense tensor; undefined if no rank passed a tensor. In sum_in, by default
  // float32 for tensors of 16 bits, as a sum may overflow where the mean does not.
  at::Tensor sum;
  double weight;    // sum over ranks
  int64_t present;  // number of ranks that passed a tensor
};
SparseSum all_reduce_sparse(const Group& group, const at::Tensor& sparse, at::IntArrayRef sizes,
                            const at::TensorOptions& options, double weight, const Label& label,
                            std::optional<std::chrono::milliseconds> timeout = {},
                            std::optional<at::ScalarType> sum_in = {});

}  // namespace shoal
