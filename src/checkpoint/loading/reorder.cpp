#include "checkpoint/loading/reorder.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "checkpoint/saving/pieces.h"

namespace shoal {
namespace {

Order complete(const Order& order, size_t dimensions) {
  if (!order.empty()) return order;
  Order row_major(dimensions);
  std::iota(row_major.begin(), row_major.end(), 0);
  return row_major;
}

}  // namespace

bool same_order(const Order& a, const Order& b) {
  const auto dimensions = std::max(a.size(), b.size());
  return complete(a, dimensions) == complete(b, dimensions);
}

void read_reordered(const std::vector<int64_t>& shape, const Order& stored, const Order& wanted, const Range& range,
                    int64_t element_bytes, char* to, const std::function<void(const Range&, char* to)>& read) {
  if (range.empty()) return;
  const auto dimensions = shape.size();
  const auto from = complete(stored, dimensions);
  const auto into = complete(wanted, dimensions);
  std::vector<int64_t> step(dimensions);  // by dimension: distance between neighbours in `wanted`
  int64_t block = 1;
  for (size_t i = dimensions; i-- > 0; block *= shape[into[i]]) step[into[i]] = block;
  for (size_t i = 0; i < dimensions && from[i] == into[i]; ++i) block /= shape[from[i]];

  const Range needed{range.begin / block * block, (range.end + block - 1) / block * block};
  std::vector<int64_t> at(dimensions);  // index of the next element, in the dimensions of `from`
  int64_t place = 0;                    // its position in `wanted`
  int64_t rest = needed.begin;
  for (size_t i = dimensions; i-- > 0; rest /= shape[from[i]]) {
    at[i] = rest % shape[from[i]];
    place += at[i] * step[from[i]];
  }
  std::vector<char> piece(piece_bytes);
  const auto most = piece_bytes / element_bytes;
  for (int64_t begin = needed.begin; begin < needed.end; begin += most) {
    const Range here{begin, std::min(begin + most, needed.end)};
    read(here, piece.data());
    for (int64_t i = 0; i < here.size(); ++i) {
      if (range.contains(place)) {
        std::memcpy(to + (place - range.begin) * element_bytes, piece.data() + i * element_bytes,
                    static_cast<size_t>(element_bytes));
      }
      for (size_t k = dimensions; k-- > 0;) {
        place += step[from[k]];
        if (++at[k] < shape[from[k]]) break;
        place -= at[k] * step[from[k]];
        at[k] = 0;
      }
    }
  }
}

}  // namespace shoal
