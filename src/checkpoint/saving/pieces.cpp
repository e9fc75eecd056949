#include "checkpoint/saving/pieces.h"

#include <algorithm>

namespace shoal {
namespace {

using PartVisitor = std::function<void(const at::Tensor& part, int64_t first)>;

void visit_parts(const at::Tensor& tensor, const PartVisitor& visit, int64_t bytes, int64_t first) {
  if (tensor.numel() == 0) return;
  if (tensor.is_contiguous() || static_cast<int64_t>(tensor.nbytes()) <= bytes) return visit(tensor, first);
  const auto count = tensor.size(0);
  const auto row = tensor.numel() / count;
  const auto rows = bytes / (row * static_cast<int64_t>(tensor.element_size()));
  if (rows == 0) {
    for (int64_t i = 0; i < count; ++i) visit_parts(tensor.select(0, i), visit, bytes, first + i * row);
    return;
  }
  for (int64_t i = 0; i < count; i += rows) visit(tensor.narrow(0, i, std::min(rows, count - i)), first + i * row);
}

}  // namespace

void for_each_part(const at::Tensor& tensor, const PartVisitor& visit, int64_t bytes) {
  visit_parts(tensor, visit, bytes, 0);
}

void for_each_piece(const at::Tensor& tensor,
                    const std::function<void(const void* data, int64_t first, int64_t size)>& visit, int64_t bytes) {
  const auto element = static_cast<int64_t>(tensor.element_size());
  for_each_part(
      tensor.detach(),
      [&](const at::Tensor& part, int64_t first) {
        const auto flat = part.contiguous().view({-1});
        for (int64_t begin = 0; begin < flat.numel(); begin += bytes / element) {
          const auto size = std::min(bytes / element, flat.numel() - begin);
          const auto here = flat.narrow(0, begin, size).to(at::kCPU).resolve_conj().resolve_neg();
          visit(here.data_ptr(), first + begin, size * element);
        }
      },
      bytes);
}

}  // namespace shoal
