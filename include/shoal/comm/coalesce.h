#pragma once
// Many tensors in few operations.

#include <vector>

#include "shoal/comm/group.h"

namespace shoal {

// What travels together: tensors of one dtype and device, at most `chunk_bytes` (a larger tensor alone).
std::vector<std::vector<at::Tensor>> coalesced(std::vector<at::Tensor> tensors, int64_t chunk_bytes = 250LL << 20);

// Every tensor <- the root's. They travel as coalesced() says. Any layout is accepted. Collective; blocks; extra
// memory: one chunk.
void broadcast_coalesced(const Group& group, const std::vector<at::Tensor>& tensors, int root, const Label& label,
                         int64_t chunk_bytes = 250LL << 20);

// The mean over ranks of a sparse COO tensor, weighted: sum of values / sum of weights, where a rank passes nothing
// (an undefined tensor) if it has no gradient. Collective; blocks; moves the non-zero rows only.
struct SparseSum {
  at::Tensor sum;   // coalesced; undefined when no rank has one
  double weight;    // sum over ranks
  int64_t present;  // number of ranks that passed a tensor
};
SparseSum all_reduce_sparse(const Group& group, const at::Tensor& sparse, at::IntArrayRef sizes,
                            const at::TensorOptions& options, double weight, const Label& label);

}  // namespace shoal
