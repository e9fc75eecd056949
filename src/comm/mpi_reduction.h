#pragma once
// Reductions in MPI's terms, and what of them is done on this rank. Only for files of comm/.

#include <mpi.h>

#include "shoal/comm/call.h"

namespace shoal {

// Throws UsageError for a reduction that has no meaning for the dtype, or a dtype that MPI cannot reduce.
void require_reducible(const Call& call);

MPI_Datatype mpi_type(at::ScalarType dtype);
// For avg, the sum; for bool, the logical operation.
MPI_Op mpi_op(ReduceOp op, at::ScalarType dtype);

// What ranks reduce instead of `tensor`: for 16-bit floats a float32 copy, so that they are rounded once; else itself.
at::Tensor widened(const at::Tensor& tensor);
// result <- what remains of the reduction once `total` is reduced over `size` ranks. They may be the same tensor.
void conclude(at::Tensor result, at::Tensor total, ReduceOp op, int size);
// result [n] <- the reduction of parts [size, n] in the order of ranks, for every dtype like the two above.
void reduce_parts(const at::Tensor& result, const at::Tensor& parts, ReduceOp op);

}  // namespace shoal
