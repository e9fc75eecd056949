#pragma once
// Calls without data. Ranks must make them in the same order as all others, so a transport may not leave them out.

#include "shoal/detail/call.h"

namespace shoal {

// Whether the collective moves no data on any rank, as far as this one knows. Of parts that differ in size, all may be
// empty on one rank only.
inline bool is_empty(const Call& call) {
  const bool lists = call.inputs.size() > 1 || call.outputs.size() > 1;
  if (call.op == Op::send || call.op == Op::recv) return false;
  return call.op != Op::barrier && call.bytes() == 0 && !(call.op == Op::all_to_all && lists);
}

// The same call without tensors, for transports that have no empty ones.
inline Call as_barrier(const Call& call) {
  return {.op = Op::barrier, .inputs = {}, .outputs = {}, .label = call.label, .timeout = call.timeout};
}

}  // namespace shoal
