#pragma once
// Reductions on this rank, for transports that only move bytes.

#include <vector>

#include "shoal/comm/call.h"

namespace shoal {

// Throws UsageError for a reduction that has no meaning for the tensors' dtype.
void require_reducible(const Call& call);

// result <- the reduction of the ranks' inputs in their order, whatever their size is cut into. 16-bit floats are
// reduced in float32 and rounded once, averages of integers towards zero; a sum of truth values is true if any is.
// `result` may be one of the inputs.
void reduce_in_order(const at::Tensor& result, const std::vector<at::Tensor>& inputs, ReduceOp op);

}  // namespace shoal
