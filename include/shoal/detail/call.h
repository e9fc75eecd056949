#pragma once
// Description of a collective operation: its kind, its tensors, and the label that errors, logs and traces show.

#include <torch/types.h>

#include <chrono>
#include <cstdint>
#include <optional>
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

// Reduction of a collective. avg divides the sum by the number of ranks. premul_sum multiplies each rank's tensor by
// its Call::factor and sums up.
enum class ReduceOp { sum, avg, min, max, product, band, bor, bxor, premul_sum };

// Source of a receive that takes the first message with its tag, from whichever rank.
inline constexpr int any_source = -1;

std::string to_string(Op op);
std::string to_string(ReduceOp op);
// Whether the result is a reduction of the ranks' tensors.
bool reduces(Op op);

// Purpose of an operation, shown in errors, logs and traces. It does not influence the result, but it must be equal on
// all ranks: it distinguishes two operations of the same shape that one rank calls in a different order.
struct Label {
  int64_t step = -1;    // training step, -1: outside a step
  int64_t bucket = -1;  // bucket number within the step, -1: not a bucket
  std::string what;     // "gradients of fc3.weight, fc3.bias", "buffers", ...
};

// An operation on a group, as transports receive it. Tensors are contiguous. Shapes and dtypes are equal on all ranks,
// except for operations with a root.
//
//   all_reduce, broadcast, send, recv   inputs = {t}, in place
//   reduce                              inputs = {t}; the result is in t on the root, undefined elsewhere
//   reduce_scatter                      inputs = {[size * n]}, outputs = {[n]}; rank r gets part r
//   all_gather                          inputs = {[n]}, outputs = {[size * n]}; part r comes from rank r
//   gather                              inputs = {[n]}; outputs = one [n] per rank on the root, none elsewhere
//   scatter                             outputs = {[n]}; inputs = one [n] per rank on the root, none elsewhere
//   all_to_all                          inputs, outputs = {[size * n]}, in memory of their own; part r goes to rank r,
//                                       and part r of outputs comes from there
//   barrier                             no tensors
//
// If the parts differ in size, a list of one tensor per rank replaces the single tensor: inputs of reduce_scatter and
// all_to_all, outputs of all_gather and all_to_all.
struct Call {
  Op op = Op::barrier;
  ReduceOp reduce = ReduceOp::sum;
  int peer = -1;      // root, destination or source; a rank of the group, or any_source
  int tag = 0;        // send and recv
  double factor = 1;  // premul_sum
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> outputs;
  Label label;
  std::optional<std::chrono::milliseconds> timeout{};  // of this operation; default: the group's

  // Bytes of the inputs or outputs on this rank, whichever is larger.
  int64_t bytes() const;
  // "all_reduce(sum, 1024 x float32), step 3, bucket 0: gradients of fc.weight"
  std::string describe() const;
};

}  // namespace shoal
