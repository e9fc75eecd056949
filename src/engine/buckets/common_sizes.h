#pragma once
// Sizes of buffers that serve for each other.

#include <cstdint>
#include <vector>

namespace shoal {

// For needs of `numels` elements, sizes of buffers, as few different ones as possible, so that a buffer can be used by
// several needs in turn. A buffer has at most `most_unused` elements that its need does not use, or is at most
// `most_times` as large; sizes that then differ by an eighth or less become one.
std::vector<int64_t> common_sizes(const std::vector<int64_t>& numels, int64_t most_unused, int64_t most_times);

}  // namespace shoal
