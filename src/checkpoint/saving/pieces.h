#pragma once
// Traversal of a tensor in pieces, so that only one piece is copied at a time.

#include <torch/types.h>

#include <functional>

namespace shoal {

// Size in bytes of a piece, and of the range of one checksum; a multiple of every dtype's size.
constexpr int64_t piece_bytes = 1 << 20;

// Calls `visit` with parts of the tensor (views) and the index of each part's first element. The parts cover the tensor
// in row-major order. Each is contiguous, or at most `bytes` large.
void for_each_part(const at::Tensor& tensor, const std::function<void(const at::Tensor& part, int64_t first)>& visit,
                   int64_t bytes = piece_bytes);

// The same with contiguous host memory, at most `bytes` (a multiple of the element's size) at a time.
void for_each_piece(const at::Tensor& tensor,
                    const std::function<void(const void* data, int64_t first, int64_t size)>& visit,
                    int64_t bytes = piece_bytes);

}  // namespace shoal
