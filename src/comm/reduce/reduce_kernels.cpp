#include "comm/reduce/reduce_kernels.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <algorithm>
#include <optional>
#ifdef SHOAL_HAS_AVX2_KERNELS
#include <cpuid.h>
#endif

#include "comm/reduce/reduce_blocks.h"
#include "shoal/error.h"

namespace shoal {
namespace {

std::optional<kernels::Type> kernel_type(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Double:
      return kernels::Type::f64;
    case c10::ScalarType::Float:
      return kernels::Type::f32;
    case c10::ScalarType::Half:
      return kernels::Type::f16;
    case c10::ScalarType::BFloat16:
      return kernels::Type::bf16;
    case c10::ScalarType::Long:
      return kernels::Type::i64;
    case c10::ScalarType::Int:
      return kernels::Type::i32;
    case c10::ScalarType::Short:
      return kernels::Type::i16;
    case c10::ScalarType::Char:
      return kernels::Type::i8;
    case c10::ScalarType::Byte:
      return kernels::Type::u8;
    case c10::ScalarType::Bool:
      return kernels::Type::boolean;
    default:
      return std::nullopt;
  }
}

kernels::Operation kernel_operation(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
      return kernels::Operation::sum;
    case ReduceOp::avg:
      return kernels::Operation::avg;
    case ReduceOp::min:
      return kernels::Operation::min;
    case ReduceOp::max:
      return kernels::Operation::max;
    case ReduceOp::product:
      return kernels::Operation::product;
    case ReduceOp::band:
      return kernels::Operation::band;
    case ReduceOp::bor:
      return kernels::Operation::bor;
    case ReduceOp::bxor:
      return kernels::Operation::bxor;
    case ReduceOp::premul_sum:
      return kernels::Operation::premul_sum;
  }
  return kernels::Operation::sum;
}

#ifdef SHOAL_HAS_AVX2_KERNELS
// Needed because clang 14's __builtin_cpu_supports does not know F16C.
bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#endif

kernels::Kernel find(kernels::Type type, kernels::Operation operation) {
#ifdef SHOAL_HAS_AVX2_KERNELS
  static const bool avx2 = __builtin_cpu_supports("avx2") && has_f16c();
  if (avx2) return kernels::find_avx2(type, operation);
#endif
  return kernels::find_baseline(type, operation);
}

kernels::Kernel find(c10::ScalarType dtype, ReduceOp op) {
  const auto type = kernel_type(dtype);
  return type ? find(*type, kernel_operation(op)) : nullptr;
}

}  // namespace

void require_reducible(const Call& call) {
  const auto dtype = call.inputs[0].scalar_type();
  if (find(dtype, call.reduce) != nullptr) return;
  throw UsageError(
      fmt::format("{}: {} is not defined for {}", call.describe(), to_string(call.reduce), toString(dtype)));
}

void reduce_in_order(const at::Tensor& result, const std::vector<at::Tensor>& inputs, ReduceOp op) {
  Reduction reduction{.dtype = result.scalar_type(),
                      .op = op,
                      .sources = {},
                      .factors = {},
                      .destinations = {static_cast<std::byte*>(result.data_ptr())},
                      .numel = result.numel()};
  for (const auto& input : inputs) reduction.sources.push_back(static_cast<const std::byte*>(input.data_ptr()));
  reduce(reduction);
}

void reduce(const Reduction& reduction) {
  const auto kernel = find(reduction.dtype, reduction.op);
  if (kernel == nullptr) {
    throw UsageError(fmt::format("{} is not defined for {}", to_string(reduction.op), toString(reduction.dtype)));
  }
  constexpr int64_t grain = 32768;  // minimum number of elements per thread that is worth waking it
  const std::vector<const void*> sources(reduction.sources.begin(), reduction.sources.end());
  const std::vector<void*> destinations(reduction.destinations.begin(), reduction.destinations.end());
  // Larger than a core's own cache; smaller results are soon read again.
  constexpr int64_t streamed_bytes = int64_t{2} << 20;
  const bool stream = destinations.size() == 1 &&
                      reduction.numel * static_cast<int64_t>(c10::elementSize(reduction.dtype)) >= streamed_bytes &&
                      std::find(sources.begin(), sources.end(), destinations[0]) == sources.end();
  const auto run = [&](int64_t begin, int64_t end) {
    kernel({sources.data(), static_cast<int>(sources.size()), reduction.factors.data(), destinations.data(),
            static_cast<int>(destinations.size()), begin, end, stream});
  };
  if (reduction.one_thread) return run(0, reduction.numel);
  at::parallel_for(0, reduction.numel, grain, run);
}

}  // namespace shoal
