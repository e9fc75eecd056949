#pragma once
// Contiguous pieces of a call's tensors.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "shoal/detail/call.h"

namespace shoal {

struct Piece {
  std::byte* data = nullptr;
  int64_t bytes = 0;
};

inline Piece piece_of(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.data_ptr()), static_cast<int64_t>(tensor.nbytes())};
}

// Equal parts of one tensor, or one tensor per rank.
inline std::vector<Piece> parts_of(const std::vector<at::Tensor>& tensors, int size) {
  std::vector<Piece> list;
  if (tensors.size() == 1) {
    const auto whole = piece_of(tensors[0]);
    const auto bytes = whole.bytes / size;
    for (int rank = 0; rank < size; ++rank) list.push_back({whole.data + rank * bytes, bytes});
  } else {
    for (const auto& tensor : tensors) list.push_back(piece_of(tensor));
  }
  return list;
}

}  // namespace shoal
