#pragma once
// Who owns which elements of a flat buffer: the first of the four questions in which strategies differ.

#include <span>
#include <vector>

#include "shoal/layout/flat_layout.h"

namespace shoal {

// Immutable; keeps nothing of the layout that it was made from.
class Partition {
 public:
  // Every rank owns everything (DDP).
  static Partition replicated(const FlatLayout& layout, int world);
  // Every piece has one owner (ZeRO-1, ZeRO-2). Largest first to the least loaded rank, so that no rank owns more than
  // the mean plus the largest piece; deterministic.
  static Partition whole_pieces(const FlatLayout& layout, int world);
  // As before with owners[piece] given.
  static Partition whole_pieces(const FlatLayout& layout, int world, std::span<const int> owners);
  // Rank r owns the r-th of `world` equal ranges of the buffer (Megatron, FSDP); pieces may be cut anywhere. The layout
  // must have been made with parts = world.
  static Partition equal_ranges(const FlatLayout& layout, int world);

  int world() const { return static_cast<int>(owned_.size()); }
  // Ranges of the buffer that the rank owns, ascending, disjoint.
  const std::vector<Range>& owned(int rank) const { return owned_.at(rank); }
  // The parts of pieces that the rank owns, in buffer order.
  const std::vector<Slice>& slices(int rank) const { return slices_.at(rank); }
  // Elements in the rank's ranges, and the largest such number over ranks.
  int64_t owned_size(int rank) const;
  int64_t max_owned_size() const;

 private:
  Partition(const FlatLayout& layout, std::vector<std::vector<Range>> owned);

  std::vector<std::vector<Range>> owned_;
  std::vector<std::vector<Slice>> slices_;
};

}  // namespace shoal
