#include "engine/buckets/common_sizes.h"

#include <algorithm>

namespace shoal {

std::vector<int64_t> common_sizes(const std::vector<int64_t>& numels, int64_t most_unused, int64_t most_times) {
  std::vector<int64_t> sizes;
  for (const auto numel : numels) {
    auto size = numel;
    for (const auto other : numels) {
      if (other - numel <= most_unused || other <= most_times * numel) size = std::max(size, other);
    }
    sizes.push_back(size);
  }
  // A need just beyond the limit of some, and not of others, would make two sizes of which the smaller one does not
  // serve for most needs.
  const auto before = sizes;
  for (auto& size : sizes) {
    const auto limit = size + size / 8;
    for (const auto other : before) {
      if (other <= limit) size = std::max(size, other);
    }
  }
  return sizes;
}

}  // namespace shoal
