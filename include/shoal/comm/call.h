#pragma once
// What a collective operation is: the operation, its tensors, and the label that errors, logs and traces show.

#include <torch/types.h>

#include <cstdint>
#include <string>
#include <vector>

namespace shoal {

enum class Op {
  all_reduce,
  reduce,
  reduce_scatter,
  all_gather,
  broadcast,
  gather,
  scatter,
  all_to_all,
  send,
  recv,
  barrier
};

enum class ReduceOp { sum, avg, min, max, product, band, bor, bxor };

std::string to_string(Op op);
std::string to_string(ReduceOp op);

// Why an operation is called. Shown in errors, logs and traces; it has no influence on the result.
struct Label {
  int64_t step = -1;    // training step, -1: outside a step
  int64_t bucket = -1;  // bucket number within the step, -1: not a bucket
  std::string what;     // "gradients of fc3.weight, fc3.bias", "buffers", ...
};

// One operation on one group, as every transport receives it. Tensors are contiguous; shapes and dtypes are equal on
// all ranks, except where an operation has a root.
//
//   all_reduce, broadcast, send, recv   inputs = {t}, in place
//   reduce                              inputs = {t}; the result is in t on the root, t is undefined elsewhere
//   reduce_scatter                      inputs = {[size * n]}, outputs = {[n]}: rank r gets the r-th part
//   all_gather                          inputs = {[n]}, outputs = {[size * n]}: the r-th part is rank r's
//   gather                              inputs = {[n]}; outputs = one [n] per rank on the root, none elsewhere
//   scatter                             outputs = {[n]}; inputs = one [n] per rank on the root, none elsewhere
//   all_to_all                          inputs = {[size * n]}, outputs = {[size * n]}, part r goes to, comes from, rank
//   r barrier                             no tensors
struct Call {
  Op op = Op::barrier;
  ReduceOp reduce = ReduceOp::sum;
  int peer = -1;  // root, destination or source; a rank of the group
  int tag = 0;    // send and recv
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> outputs;
  Label label;

  // Bytes of the larger side on this rank (what a memcpy of the operation's data would move).
  int64_t bytes() const;
  // "all_reduce(sum, 1024 x float32), step 3, bucket 0: gradients of fc.weight"
  std::string describe() const;
};

}  // namespace shoal
