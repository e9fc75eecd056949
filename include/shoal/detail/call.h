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

// avg divides the sum by the number of ranks. premul_sum adds every rank's tensor times its Call::factor.
enum class ReduceOp { sum, avg, min, max, product, band, bor, bxor, premul_sum };

std::string to_string(Op op);
std::string to_string(ReduceOp op);

// Why an operation is called. Shown in errors, logs and traces; it has no influence on the result, but it is part of
// what ranks must agree on: two operations of equal shape that trade places on one rank are told apart by it. So it
// must be equal on all ranks.
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
//   all_to_all                          inputs = {[size * n]}, outputs = {[size * n]}, part r goes to, comes from rank
//   r barrier                             no tensors
//
// Where parts differ in size, a list of one tensor per rank takes the place of the one tensor of all parts:
// reduce_scatter and all_to_all inputs, all_gather and all_to_all outputs.
struct Call {
  Op op = Op::barrier;
  ReduceOp reduce = ReduceOp::sum;
  int peer = -1;      // root, destination or source; a rank of the group
  int tag = 0;        // send and recv
  double factor = 1;  // premul_sum
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> outputs;
  Label label;

  // Bytes of the larger side on this rank (what a memcpy of the operation's data would move).
  int64_t bytes() const;
  // "all_reduce(sum, 1024 x float32), step 3, bucket 0: gradients of fc.weight"
  std::string describe() const;
};

}  // namespace shoal
