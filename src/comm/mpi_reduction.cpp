#include "comm/mpi_reduction.h"

#include <fmt/format.h>
#include <torch/types.h>

#include "shoal/base/error.h"

namespace shoal {
namespace {

bool is_bitwise(ReduceOp op) {
  return op == ReduceOp::band || op == ReduceOp::bor || op == ReduceOp::bxor;
}

MPI_Op logical(ReduceOp op) {
  switch (op) {
    case ReduceOp::min:
    case ReduceOp::product:
    case ReduceOp::band:
      return MPI_LAND;
    case ReduceOp::bxor:
      return MPI_LXOR;
    default:
      return MPI_LOR;
  }
}

// total <- a (op) b
void combine(at::Tensor& total, const at::Tensor& a, const at::Tensor& b, ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::avg:
      at::add_out(total, a, b);
      break;
    case ReduceOp::min:
      at::minimum_out(total, a, b);
      break;
    case ReduceOp::max:
      at::maximum_out(total, a, b);
      break;
    case ReduceOp::product:
      at::mul_out(total, a, b);
      break;
    case ReduceOp::band:
      at::bitwise_and_out(total, a, b);
      break;
    case ReduceOp::bor:
      at::bitwise_or_out(total, a, b);
      break;
    case ReduceOp::bxor:
      at::bitwise_xor_out(total, a, b);
      break;
  }
}

}  // namespace

void require_reducible(const Call& call) {
  const auto dtype = call.inputs[0].scalar_type();
  if (mpi_type(widened(at::empty({0}, dtype)).scalar_type()) == MPI_DATATYPE_NULL) {
    throw UsageError(fmt::format("{}: MPI does not reduce this dtype", call.describe()));
  }
  if (is_bitwise(call.reduce) && at::isFloatingType(dtype)) {
    throw UsageError(fmt::format("{}: floating-point numbers have no bitwise operations", call.describe()));
  }
  if (call.reduce == ReduceOp::avg && dtype == at::kBool) {
    throw UsageError(fmt::format("{}: truth values have no average", call.describe()));
  }
}

MPI_Datatype mpi_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return MPI_DOUBLE;
    case at::kFloat:
      return MPI_FLOAT;
    case at::kLong:
      return MPI_INT64_T;
    case at::kInt:
      return MPI_INT32_T;
    case at::kShort:
      return MPI_INT16_T;
    case at::kChar:
      return MPI_INT8_T;
    case at::kByte:
      return MPI_UINT8_T;
    case at::kBool:
      return MPI_C_BOOL;
    default:
      return MPI_DATATYPE_NULL;
  }
}

MPI_Op mpi_op(ReduceOp op, at::ScalarType dtype) {
  if (dtype == at::kBool) return logical(op);
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::avg:
      return MPI_SUM;
    case ReduceOp::min:
      return MPI_MIN;
    case ReduceOp::max:
      return MPI_MAX;
    case ReduceOp::product:
      return MPI_PROD;
    case ReduceOp::band:
      return MPI_BAND;
    case ReduceOp::bor:
      return MPI_BOR;
    case ReduceOp::bxor:
      return MPI_BXOR;
  }
  return MPI_OP_NULL;
}

at::Tensor widened(const at::Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  return dtype == at::kHalf || dtype == at::kBFloat16 ? tensor.to(at::kFloat) : tensor;
}

void conclude(at::Tensor result, at::Tensor total, ReduceOp op, int size) {
  if (op == ReduceOp::avg) {
    if (at::isFloatingType(total.scalar_type())) {
      total.div_(size);
    } else {
      total.div_(size, "trunc");
    }
  }
  if (!total.is_same(result)) result.copy_(total);
}

void reduce_parts(const at::Tensor& result, const at::Tensor& parts, ReduceOp op) {
  const auto size = parts.size(0);
  const auto first = widened(parts[0]);
  auto total = first.scalar_type() == result.scalar_type() ? result : first;
  combine(total, first, parts[1], op);
  for (int64_t rank = 2; rank < size; ++rank) combine(total, total, parts[rank], op);
  conclude(result, total, op, static_cast<int>(size));
}

}  // namespace shoal
