#include "layout/flat_layout.h"

#include <fmt/format.h>

#include <algorithm>

#include "shoal/error.h"

namespace shoal {
namespace {
int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}
}  // namespace

FlatLayout::FlatLayout(std::span<const int64_t> numels, size_t element_bytes, int64_t alignment_bytes, int parts)
    : element_bytes_(element_bytes), parts_(parts) {
  if (element_bytes == 0) throw UsageError("FlatLayout: an element has 0 bytes");
  if (alignment_bytes < 1 || alignment_bytes % static_cast<int64_t>(element_bytes) != 0) {
    throw UsageError(fmt::format("FlatLayout: an alignment of {} bytes is no multiple of elements of {} bytes",
                                 alignment_bytes, element_bytes));
  }
  if (parts < 1) throw UsageError(fmt::format("FlatLayout: {} parts; give at least 1", parts));
  const int64_t alignment = alignment_bytes / static_cast<int64_t>(element_bytes);
  for (const auto numel : numels) {
    if (numel < 0) throw UsageError(fmt::format("FlatLayout: a piece of {} elements", numel));
    const auto begin = round_up(size_, alignment);
    ranges_.push_back({begin, begin + numel});
    numel_ += numel;
    size_ = begin + numel;
  }
  size_ = round_up(size_, alignment * parts);
}

Range FlatLayout::part(int index) const {
  if (index < 0 || index >= parts_) throw UsageError(fmt::format("FlatLayout: part {} of {}", index, parts_));
  const auto share = size_ / parts_;
  return {index * share, (index + 1) * share};
}

std::vector<Slice> FlatLayout::overlapping(const Range& flat) const {
  // Pieces are ascending, so the first one that can overlap is found by its end.
  const auto first =
      std::partition_point(ranges_.begin(), ranges_.end(), [&](const Range& range) { return range.end <= flat.begin; });
  std::vector<Slice> slices;
  for (auto it = first; it != ranges_.end() && it->begin < flat.end; ++it) {
    const auto common = it->intersect(flat);
    if (common.empty()) continue;
    slices.push_back(
        {static_cast<size_t>(it - ranges_.begin()), {common.begin - it->begin, common.end - it->begin}, common});
  }
  return slices;
}

}  // namespace shoal
