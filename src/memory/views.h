#pragma once
// Flat buffers, and parameter-shaped views of them.

#include <torch/types.h>

#include <cstdint>
#include <vector>

namespace shoal {

// View of flat[offset, offset + tensor.numel()) with the tensor's shape, and with its strides if the tensor is dense
// (such as channels-last weights); other layouts become row-major. `flat` is one-dimensional.
at::Tensor view_like(const at::Tensor& flat, int64_t offset, const at::Tensor& tensor);

// Strides of view_like()'s result.
std::vector<int64_t> dense_strides(const at::Tensor& tensor);

// The tensor's elements in the order of such a view, [numel]: the same memory if the tensor is dense, else a copy.
at::Tensor in_memory_order(const at::Tensor& tensor);

// Zeros [numel] aligned to 128 bytes: whole cache-line pairs and the widest vector loads. libtorch's CPU allocator
// aligns to 64.
at::Tensor aligned_zeros(int64_t numel, const at::TensorOptions& options);

// Data pointer for another storage, which keeps the tensor alive.
c10::DataPtr pointer_to(const at::Tensor& memory);

// True if both are strided tensors on one storage. Does not access memory, which the storage need not have.
bool same_storage(const at::Tensor& a, const at::Tensor& b);

// True if a tensor of `a` and one of `b` have bytes in common. All are contiguous.
bool share_memory(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b);

// True if both are the same elements of the same memory in the same layout.
bool same_view(const at::Tensor& a, const at::Tensor& b);

// True if all elements are zero, also of a sparse tensor.
bool is_zero(const at::Tensor& tensor);

}  // namespace shoal
