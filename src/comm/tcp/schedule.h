#pragma once
// Order of a rank's sends and receives in a collective.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "comm/transport/pieces.h"
#include "shoal/detail/call.h"

namespace shoal::tcp {

struct Segment {
  std::byte* data = nullptr;
  int64_t bytes = 0;
  int64_t after = 0;   // rounds that must be complete before it may be sent, or before its memory may be overwritten
  int64_t feeds = -1;  // round that a received segment belongs to
};

// One chunk of the part that this rank reduces or passes on.
struct Round {
  int missing = 0;                        // segments that have not come
  std::vector<const std::byte*> sources;  // to be reduced, by rank; empty: nothing to reduce
  std::byte* destination = nullptr;
  int64_t bytes = 0;
};

// S bytes on n ranks, each of which sends to each other directly:
//
//   all_reduce       each rank gets all values of its part, reduces them, and sends the result to all   2 (n - 1) / n S
//   reduce           the same, but the results go to the root                                           S
//   reduce_scatter   each rank gets all values of its part, and reduces them                            (n - 1) / n S
//   all_gather, all_to_all, gather, scatter: directly to whom it concerns
//   broadcast        the root sends each rank its part, which that rank passes on to the others         (n - 1) / n S
//
// which is the least for every rank, but for the root of a broadcast, which sends up to 2 (n - 1) / n S. Parts travel
// in chunks, so that a chunk is reduced and returned while the next ones arrive. Values are reduced in the order of
// ranks, which gives the bits of the host transport. Small tensors (bytes_with_entry) go to every rank that needs them,
// whole, and each reduces them by itself.
struct Schedule {
  std::vector<std::deque<Segment>> sends;     // by rank, in order
  std::vector<std::deque<Segment>> receives;  // likewise
  std::vector<Round> rounds;
  std::vector<std::pair<Piece, std::byte*>> copies;  // of this rank's own data, to be made at the beginning
  bool whole = false;  // each rank sends every other at most one segment, of at most bytes_with_entry
};

// Memory that a rank of a group needs for values of others which it reduces, in the operation that is under way.
int64_t staging_bytes(int size);
// staging: of staging_bytes(size).
Schedule make_schedule(const Call& call, int rank, int size, std::byte* staging);

}  // namespace shoal::tcp
