#pragma once
// Plan of an operation: the windows that a rank exposes to its peers and those that it reads, in the same form for
// every collective.

#include <cstddef>
#include <vector>

#include "shoal/detail/call.h"

namespace shoal {

struct Piece {
  std::byte* data = nullptr;
  int64_t bytes = 0;
};

// In every collective a rank lets its peers see some parts of its own data and then does one kind of work on theirs.
struct Plan {
  enum class Work {
    nothing,        // it only takes part
    copy,           // destinations[r] <- part `part` of rank r, where destinations[r] has data
    reduce,         // destinations[0] <- reduction over all ranks' part `part`
    reduce_slices,  // this rank's slice of part 0: reduction over all ranks, written back into `targets`' part 0
  };
  std::vector<Piece> exposed;  // 0, 1 or one per rank
  Work work = Work::nothing;
  int part = 0;
  std::vector<Piece> destinations;  // copy: one per rank; reduce: one; else none
  std::vector<int> targets;         // reduce_slices: the ranks that get the result
  std::vector<int64_t> expected;    // bytes that each rank must show to this one; empty: as many as this rank shows
};

// `small`: the operation travels in its header, so that every rank (or the root) reduces for itself.
Plan make_plan(const Call& call, int rank, int size, bool small);

}  // namespace shoal
