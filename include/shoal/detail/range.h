#pragma once
// Half-open range of elements.

#include <algorithm>
#include <cstdint>
#include <ostream>

namespace shoal {

// Range [begin, end) in elements. Empty if end <= begin.
struct Range {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t size() const { return std::max<int64_t>(0, end - begin); }
  bool empty() const { return end <= begin; }
  bool contains(int64_t element) const { return element >= begin && element < end; }
  // Intersection of both ranges, possibly empty.
  Range intersect(const Range& other) const { return {std::max(begin, other.begin), std::min(end, other.end)}; }
  // Range of the same size that begins at `start`.
  Range normalize(int64_t start = 0) const { return {start, start + size()}; }
  bool operator==(const Range&) const = default;
};

// Prints "begin,end [size]", as Megatron-LM does.
inline std::ostream& operator<<(std::ostream& out, const Range& range) {
  return out << range.begin << "," << range.end << " [" << range.size() << "]";
}

}  // namespace shoal
