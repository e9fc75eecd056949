#include "memory/views.h"

#include <ATen/ATen.h>
#include <c10/util/strides.h>

namespace shoal {

at::Tensor view_like(const at::Tensor& flat, int64_t offset, const at::Tensor& tensor) {
  // A tensor of its own on the same storage. Autograd would refuse detach_() on a view, and libtorch's
  // Optimizer::zero_grad calls that on every gradient.
  auto view = at::empty({0}, flat.options());
  const auto row_major = c10::contiguous_strides(tensor.sizes());
  const bool dense = tensor.layout() == at::kStrided && tensor.is_non_overlapping_and_dense();
  const auto strides = dense ? tensor.strides() : at::IntArrayRef(row_major);
  view.set_(flat.storage(), flat.storage_offset() + offset, tensor.sizes(), strides);
  return view;
}

bool same_view(const at::Tensor& a, const at::Tensor& b) {
  return a.defined() && b.defined() && a.layout() == at::kStrided && b.layout() == at::kStrided && a.is_alias_of(b) &&
         a.storage_offset() == b.storage_offset() && a.sizes() == b.sizes() && a.strides() == b.strides();
}

}  // namespace shoal
