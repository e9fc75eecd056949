#pragma once
// Kernels of reduce(), compiled once per instruction set. Plain types only: an inline function shared with another file
// could be linked in its version with the newer instructions.

#include <cstdint>

namespace shoal::kernels {

enum class Type { f64, f32, f16, bf16, i64, i32, i16, i8, u8, boolean };
enum class Operation { sum, avg, min, max, product, band, bor, bxor, premul_sum };

struct Task {
  const void* const* sources;
  int source_count;
  const double* factors;
  void* const* destinations;
  int destination_count;
  int64_t begin;  // elements
  int64_t end;
  bool stream;  // write past the caches: there is one large destination, which is not a source
};
using Kernel = void (*)(const Task&);

// nullptr if the type does not have the operation.
Kernel find_baseline(Type type, Operation operation);
Kernel find_avx2(Type type, Operation operation);  // x86 only

}  // namespace shoal::kernels
