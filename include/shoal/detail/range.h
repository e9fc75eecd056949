#pragma once
// A half-open range of elements.

#include <algorithm>
#include <cstdint>
#include <ostream>

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
  // A range of equal size that begins at `start`.
  Range normalize(int64_t start = 0) const { return {start, start + size()}; }
  bool operator==(const Range&) const = default;
};

// "begin,end [size]", as Megatron-LM prints them.
inline std::ostream& operator<<(std::ostream& out, const Range& range) {
  return out << range.begin << "," << range.end << " [" << range.size() << "]";
}

}  // namespace shoal
