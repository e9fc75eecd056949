#pragma once
// Reductions of c10d as those of a call.

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "shoal/detail/call.h"

namespace shoal {

ReduceOp from_c10d(const c10d::ReduceOp& op);
// Factor of a premultiplied sum; otherwise 1.
double factor_of(const c10d::ReduceOp& op);

}  // namespace shoal
