#include "comm/local_reduction.h"

#include <fmt/format.h>
#include <torch/types.h>

#include <algorithm>

#include "shoal/base/error.h"

namespace shoal {
namespace {

bool is_short_float(at::ScalarType dtype) {
  return dtype == at::kHalf || dtype == at::kBFloat16;
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
  constexpr at::ScalarType known[] = {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kLong,
                                      at::kInt,    at::kShort, at::kChar, at::kByte,     at::kBool};
  if (std::find(std::begin(known), std::end(known), dtype) == std::end(known)) {
    throw UsageError(fmt::format("{}: this dtype cannot be reduced", call.describe()));
  }
  const bool bitwise = call.reduce == ReduceOp::band || call.reduce == ReduceOp::bor || call.reduce == ReduceOp::bxor;
  if (bitwise && at::isFloatingType(dtype)) {
    throw UsageError(fmt::format("{}: floating-point numbers have no bitwise operations", call.describe()));
  }
  if (call.reduce == ReduceOp::avg && dtype == at::kBool) {
    throw UsageError(fmt::format("{}: truth values have no average", call.describe()));
  }
}

void reduce_in_order(const at::Tensor& result, const std::vector<at::Tensor>& inputs, ReduceOp op) {
  // The first step reads two inputs; only those may be overwritten by it.
  const bool needed_later = std::any_of(inputs.begin() + 2, inputs.end(),
                                        [&](const at::Tensor& input) { return input.data_ptr() == result.data_ptr(); });
  const bool widen = is_short_float(result.scalar_type());
  const auto first = widen ? inputs[0].to(at::kFloat) : inputs[0];
  auto total = widen ? first : needed_later ? at::empty_like(result) : result;
  combine(total, first, inputs[1], op);
  for (size_t rank = 2; rank < inputs.size(); ++rank) combine(total, total, inputs[rank], op);
  if (op == ReduceOp::avg) {
    const auto ranks = static_cast<int64_t>(inputs.size());
    if (at::isFloatingType(total.scalar_type())) {
      total.div_(ranks);
    } else {
      total.div_(ranks, "trunc");
    }
  }
  if (!total.is_same(result)) result.copy_(total);
}

}  // namespace shoal
