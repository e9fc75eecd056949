#pragma once
// Plan of an operation: the windows that a rank exposes to its peers and those that it reads, in one form for all
// collectives.

#include <cstdint>
#include <vector>

#include "comm/transport/pieces.h"
#include "shoal/detail/call.h"

namespace shoal::shm {

// In every collective a rank exposes parts of its data and then does one kind of work on the peers' data.
struct OperationPlan {
  enum class Work {
    nothing,        // the rank only takes part
    copy,           // destinations[r] <- part `part` of rank r, if destinations[r] has data
    reduce,         // destinations[0] <- reduction over all ranks' part `part`
    reduce_slices,  // this rank's slice of part 0: reduction over all ranks, written to part 0 of `targets`
  };
  std::vector<Piece> exposed;  // none, one, or one per rank
  Work work = Work::nothing;
  int part = 0;
  std::vector<Piece> destinations;  // copy: one per rank; reduce: one; else none
  std::vector<int> targets;         // reduce_slices: ranks that get the result
  std::vector<int64_t> expected;    // bytes that each rank must expose to this one; empty: as many as this rank exposes
};

// small: the data are in the header, so that every rank (or the root) reduces by itself.
OperationPlan plan_operation(const Call& call, int rank, int size, bool small);

}  // namespace shoal::shm
