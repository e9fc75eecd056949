#include "memory/views.h"

#include <ATen/ATen.h>
#include <c10/util/strides.h>

#include <algorithm>

namespace shoal {

namespace {

bool is_dense(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.is_non_overlapping_and_dense();
}

}  // namespace

at::Tensor view_like(const at::Tensor& flat, int64_t offset, const at::Tensor& tensor) {
  // A separate tensor on the same storage: autograd refuses detach_() on a view, and libtorch's Optimizer::zero_grad
  // calls it on every gradient.
  auto view = at::empty({0}, flat.options());
  view.set_(flat.storage(), flat.storage_offset() + offset, tensor.sizes(), dense_strides(tensor));
  return view;
}

std::vector<int64_t> dense_strides(const at::Tensor& tensor) {
  if (is_dense(tensor)) return tensor.strides().vec();
  const auto row_major = c10::contiguous_strides(tensor.sizes());
  return {row_major.begin(), row_major.end()};
}

at::Tensor in_memory_order(const at::Tensor& tensor) {
  const auto dense = is_dense(tensor) ? tensor.detach() : tensor.detach().contiguous();
  return dense.as_strided({dense.numel()}, {1});
}

at::Tensor aligned_zeros(int64_t numel, const at::TensorOptions& options) {
  constexpr int64_t alignment = 128;
  const auto element = static_cast<int64_t>(options.dtype().itemsize());
  auto memory = at::zeros({numel + alignment / element}, options);
  const auto address = reinterpret_cast<uintptr_t>(memory.data_ptr());
  const auto skip = static_cast<int64_t>((alignment - address % alignment) % alignment) / element;
  // Not a view, which would add a second owner of the storage: SpareMemory accepts storages with one owner only.
  return at::empty({0}, options).set_(memory.storage(), skip, {numel}, {1});
}

c10::DataPtr pointer_to(const at::Tensor& memory) {
  return {memory.data_ptr(), new at::Tensor(memory), [](void* held) { delete static_cast<at::Tensor*>(held); },
          memory.device()};
}

bool same_storage(const at::Tensor& a, const at::Tensor& b) {
  return a.defined() && b.defined() && a.layout() == at::kStrided && b.layout() == at::kStrided &&
         a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl();
}

bool share_memory(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  struct Extent {
    uintptr_t begin;
    uintptr_t end;
    bool of_b;
  };
  std::vector<Extent> extents;
  for (const auto* list : {&a, &b}) {
    for (const auto& tensor : *list) {
      const auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
      if (tensor.nbytes() > 0) extents.push_back({begin, begin + tensor.nbytes(), list == &b});
    }
  }
  std::sort(extents.begin(), extents.end(), [](const auto& x, const auto& y) { return x.begin < y.begin; });
  uintptr_t end_of_a = 0;
  uintptr_t end_of_b = 0;
  for (const auto& extent : extents) {
    if (extent.begin < (extent.of_b ? end_of_a : end_of_b)) return true;
    auto& end = extent.of_b ? end_of_b : end_of_a;
    end = std::max(end, extent.end);
  }
  return false;
}

bool same_view(const at::Tensor& a, const at::Tensor& b) {
  return same_storage(a, b) && a.storage_offset() == b.storage_offset() && a.sizes() == b.sizes() &&
         a.strides() == b.strides();
}

bool is_zero(const at::Tensor& tensor) {
  return (tensor.is_sparse() ? tensor._values() : tensor).count_nonzero().item<int64_t>() == 0;
}

}  // namespace shoal
