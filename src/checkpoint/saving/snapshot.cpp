#include "checkpoint/saving/snapshot.h"

#include <cstring>

namespace shoal {

int64_t snapshot_bytes(const at::Tensor& values) {
  constexpr int64_t alignment = 64;
  return (static_cast<int64_t>(values.nbytes()) + alignment - 1) / alignment * alignment;
}

at::Tensor snapshot(const at::Tensor& memory, const at::Tensor& values) {
  const auto flat = memory.view(values.scalar_type());
  const bool plain = values.is_cpu() && values.is_non_overlapping_and_dense() && !values.is_neg() && !values.is_conj();
  if (!plain) return flat.view(values.sizes()).copy_(values);
  std::memcpy(memory.data_ptr(), values.data_ptr(), values.nbytes());
  return flat.as_strided(values.sizes(), values.strides());
}

}  // namespace shoal
