#pragma once
// A tensor bit by bit, so that no more than a bit of it is copied.

#include <torch/types.h>

#include <functional>

namespace shoal {

// Bytes of one piece, and of what one checksum covers; a multiple of every dtype's size.
constexpr int64_t piece_bytes = 1 << 20;

// Calls `visit` with parts of the tensor (views) and the number of each part's first element, in row-major order; one
// of them after the other they are the whole. Each is either contiguous or at most `bytes` large.
void for_each_part(const at::Tensor& tensor, const std::function<void(const at::Tensor& part, int64_t first)>& visit,
                   int64_t bytes = piece_bytes);

// The same as contiguous memory of this host, at most `bytes` (a multiple of the element's size) at a time.
void for_each_piece(const at::Tensor& tensor,
                    const std::function<void(const void* data, int64_t first, int64_t size)>& visit,
                    int64_t bytes = piece_bytes);

}  // namespace shoal
