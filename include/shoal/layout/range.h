#pragma once
// A half-open range of elements.

#include <algorithm>
#include <cstdint>

namespace shoal {

// [begin, end), in elements. Empty when end <= begin.
struct Range {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t size() const { return std::max<int64_t>(0, end - begin); }
  bool empty() const { return end <= begin; }
  bool contains(int64_t element) const { return element >= begin && element < end; }
  // The common part; empty when there is none.
  Range intersect(const Range& other) const { return {std::max(begin, other.begin), std::min(end, other.end)}; }
  bool operator==(const Range&) const = default;
};

}  // namespace shoal
