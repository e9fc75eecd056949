#pragma once
// Kernels of reduce(), compiled once for every instruction set. Plain types only: nothing here may pull in an inline
// function that another file shares, since the linker could then keep the copy with the newer instructions.

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
  bool stream;  // write past the caches: the one destination is large and none of the sources
};
using Kernel = void (*)(const Task&);

// nullptr when the type does not have the operation.
Kernel find_baseline(Type type, Operation operation);
Kernel find_avx2(Type type, Operation operation);  // x86 only

}  // namespace shoal::kernels
