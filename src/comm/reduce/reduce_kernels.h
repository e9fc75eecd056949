#pragma once
// Element-wise reduction of several buffers in a fixed order.

#include <torch/types.h>

#include <cstddef>
#include <vector>

#include "shoal/detail/call.h"

namespace shoal {

struct Reduction {
  c10::ScalarType dtype = c10::ScalarType::Float;
  ReduceOp op = ReduceOp::sum;
  std::vector<const std::byte*> sources;  // in rank order; element i of the result is ((s0 + s1) + s2) + ...
  std::vector<double> factors;            // one per source for ReduceOp::premul_sum, else empty
  std::vector<std::byte*> destinations;   // all get the result; each may be one of the sources
  int64_t numel = 0;
  bool one_thread = false;  // for a thread that works beside the computation
};

// 16-bit floating-point numbers are reduced in float32 and rounded once (to nearest even). avg divides the sum by the
// number of sources; the mean of equal values is exact, also where their sum is beyond the range. bool: sum, max and
// bor are "or"; product, min and band are "and"; bxor is "differs". Uses libtorch's intra-op threads. UsageError if the
// dtype does not have the operation (avg on integers, band on floats).
void reduce(const Reduction& reduction);

// The same for tensors of one shape and dtype: result <- the reduction of `inputs` in their order. `result` may be one
// of them.
void reduce_in_order(const at::Tensor& result, const std::vector<at::Tensor>& inputs, ReduceOp op);

// UsageError if the dtype of the call's tensors does not have its reduction.
void require_reducible(const Call& call);

}  // namespace shoal
