#include "shoal/layout/partition.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "shoal/base/error.h"

namespace shoal {
namespace {

void check_world(int world) {
  if (world < 1) throw UsageError(fmt::format("Partition: a world of {} ranks; give at least 1", world));
}

std::vector<int> balanced_owners(const FlatLayout& layout, int world) {
  std::vector<size_t> order(layout.pieces());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return layout.range(a).size() > layout.range(b).size(); });
  std::vector<int64_t> load(world);
  std::vector<int> owners(layout.pieces());
  for (const auto piece : order) {
    const auto least = std::min_element(load.begin(), load.end());
    *least += layout.range(piece).size();
    owners[piece] = static_cast<int>(least - load.begin());
  }
  return owners;
}

}  // namespace

Partition::Partition(const FlatLayout& layout, std::vector<std::vector<Range>> owned) : owned_(std::move(owned)) {
  for (const auto& ranges : owned_) {
    auto& slices = slices_.emplace_back();
    for (const auto& range : ranges) {
      const auto part = layout.overlapping(range);
      slices.insert(slices.end(), part.begin(), part.end());
    }
  }
}

Partition Partition::replicated(const FlatLayout& layout, int world) {
  check_world(world);
  return {layout, std::vector<std::vector<Range>>(world, {{0, layout.size()}})};
}

Partition Partition::whole_pieces(const FlatLayout& layout, int world) {
  check_world(world);
  return whole_pieces(layout, world, balanced_owners(layout, world));
}

Partition Partition::whole_pieces(const FlatLayout& layout, int world, std::span<const int> owners) {
  check_world(world);
  if (owners.size() != layout.pieces()) {
    throw UsageError(fmt::format("Partition: {} owners for {} pieces", owners.size(), layout.pieces()));
  }
  std::vector<std::vector<Range>> owned(world);
  for (size_t piece = 0; piece < owners.size(); ++piece) {
    if (owners[piece] < 0 || owners[piece] >= world) {
      throw UsageError(fmt::format("Partition: piece {} is owned by rank {} of {}", piece, owners[piece], world));
    }
    owned[owners[piece]].push_back(layout.range(piece));
  }
  return {layout, std::move(owned)};
}

Partition Partition::equal_ranges(const FlatLayout& layout, int world) {
  check_world(world);
  if (layout.parts() != world) {
    throw UsageError(fmt::format("Partition: a layout of {} parts for {} ranks", layout.parts(), world));
  }
  std::vector<std::vector<Range>> owned;
  for (int rank = 0; rank < world; ++rank) owned.push_back({layout.part(rank)});
  return {layout, std::move(owned)};
}

int64_t Partition::owned_size(int rank) const {
  int64_t size = 0;
  for (const auto& range : owned(rank)) size += range.size();
  return size;
}

int64_t Partition::max_owned_size() const {
  int64_t most = 0;
  for (int rank = 0; rank < world(); ++rank) most = std::max(most, owned_size(rank));
  return most;
}

}  // namespace shoal
