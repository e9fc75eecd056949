#pragma once
// Inputs for the host transport, and expected results from a naive second implementation.

#include <vector>

#include "shoal/group.h"
#include "tests/support/world.h"

namespace shoal::test {

// Kind of memory of a rank's tensors. mixed: shared on even ranks only.
enum class Memory { shared, staged, mixed };

inline at::Tensor in_memory(const at::Tensor& tensor, Memory memory) {
  if (memory == Memory::staged || (memory == Memory::mixed && group().rank() % 2 == 1)) return tensor.clone();
  const auto shared = group().allocate(tensor.numel(), tensor.options());
  return shared.copy_(tensor);
}

// Deterministic values, different on every rank, with fractions that 16-bit sums must round. They repeat themselves: a
// remainder for each element took most of the time of these tests.
inline at::Tensor input(int rank, int64_t numel, at::ScalarType dtype, int salt = 0) {
  constexpr int64_t period = 23;
  const auto numbers = (at::arange(period, at::kLong) * 7 + rank * 13 + salt * 31) % period + 1;
  auto values = (numbers.to(at::kDouble) / 16 + 0.9).to(dtype);
  if (!at::isFloatingType(dtype)) values = (dtype == at::kBool ? numbers % 2 : numbers % 5 + 1).to(dtype);
  return values.repeat({numel / period + 1}).narrow(0, 0, numel).clone();
}

inline at::Tensor combine(const at::Tensor& a, const at::Tensor& b, ReduceOp op) {
  switch (op) {
    case ReduceOp::min:
      return at::minimum(a, b);
    case ReduceOp::max:
      return at::maximum(a, b);
    case ReduceOp::product:
      return a * b;
    case ReduceOp::band:
      return at::bitwise_and(a, b);
    case ReduceOp::bor:
      return at::bitwise_or(a, b);
    case ReduceOp::bxor:
      return at::bitwise_xor(a, b);
    default:
      return a + b;
  }
}

// Reduction in rank order; 16-bit values in float32, rounded once.
inline at::Tensor naive(const std::vector<at::Tensor>& inputs, ReduceOp op) {
  const auto dtype = inputs[0].scalar_type();
  const bool half = dtype == at::kHalf || dtype == at::kBFloat16;
  auto result = half ? inputs[0].to(at::kFloat) : inputs[0].clone();
  for (size_t i = 1; i < inputs.size(); ++i) result = combine(result, half ? inputs[i].to(at::kFloat) : inputs[i], op);
  if (op == ReduceOp::avg) result = result / static_cast<double>(inputs.size());
  return result.to(dtype);
}

inline std::vector<at::Tensor> all_inputs(int64_t numel, at::ScalarType dtype, int salt = 0) {
  std::vector<at::Tensor> list;
  for (int rank = 0; rank < group().size(); ++rank) list.push_back(input(rank, numel, dtype, salt));
  return list;
}

inline at::Tensor own(int64_t numel, at::ScalarType dtype, int salt = 0) {
  return input(group().rank(), numel, dtype, salt);
}

}  // namespace shoal::test
