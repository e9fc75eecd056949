#include "memory/views.h"

namespace shoal {

at::Tensor view_like(const at::Tensor& flat, int64_t offset, const at::Tensor& tensor) {
  if (tensor.layout() == at::kStrided && tensor.is_non_overlapping_and_dense()) {
    return flat.as_strided(tensor.sizes(), tensor.strides(), flat.storage_offset() + offset);
  }
  return flat.narrow(0, offset, tensor.numel()).view(tensor.sizes());
}

bool same_view(const at::Tensor& a, const at::Tensor& b) {
  return a.defined() && b.defined() && a.layout() == at::kStrided && b.layout() == at::kStrided &&
         a.is_alias_of(b) && a.storage_offset() == b.storage_offset() && a.sizes() == b.sizes() &&
         a.strides() == b.strides();
}

}  // namespace shoal
