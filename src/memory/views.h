#pragma once
// Flat memory and parameter-shaped views of it.

#include <torch/types.h>

#include <cstdint>
#include <vector>

namespace shoal {

// A view of flat[offset, offset + tensor.numel()) with the tensor's shape, and with its strides as well where it fills
// its memory densely (channels-last convolutions); other layouts become row-major. `flat` is one-dimensional.
at::Tensor view_like(const at::Tensor& flat, int64_t offset, const at::Tensor& tensor);

// Strides of that view.
std::vector<int64_t> dense_strides(const at::Tensor& tensor);

// The tensor's elements as they lie in such a view, [numel]: the same memory where the tensor is dense, else a copy.
at::Tensor in_memory_order(const at::Tensor& tensor);

// Zeroes [numel] that start on a multiple of 128 bytes: whole cache-line pairs and the widest vector loads. The CPU
// allocator of libtorch gives 64.
at::Tensor aligned_zeros(int64_t numel, const at::TensorOptions& options);

// The tensor's memory for a storage of its own, which keeps the tensor alive.
c10::DataPtr pointer_to(const at::Tensor& memory);

// True when both are dense-layout tensors on one storage; looks at no memory, which a storage need not have.
bool same_storage(const at::Tensor& a, const at::Tensor& b);

// True when both are the same elements of the same memory in the same layout.
bool same_view(const at::Tensor& a, const at::Tensor& b);

}  // namespace shoal
