#pragma once
// Plan of a reduction: which gradients share a bucket, which rank keeps which part of the sum, and where a step's
// trailer rides.

#include "engine/buckets/bucket.h"
#include "shoal/hooks.h"

namespace shoal {

struct BucketCaps {
  int64_t first_bytes = 1 << 20;
  int64_t bytes = 25 << 20;
  std::optional<int64_t> most_numel{};  // no bucket exceeds these elements, unless a single gradient does
};

// The sum that a communication hook makes.
struct HookPoint {
  Group group;
  SumResult result = SumResult::all_ranks;
  bool of_kept = false;  // of Bucket::kept after a sum in a smaller group, not of the whole bucket
};

// The same on all ranks.
struct ReductionPlan {
  HookPoint hook_point;
  SumResult keeps = SumResult::all_ranks;

  // Buckets.
  BucketCaps caps{};
  bool follows_order = true;   // buckets follow the order of arrival; else reverse registration
  std::vector<int> divided{};  // by gradient: different numbers share no bucket; empty: no limit

  // Sums. Ranks that share a sum are numbered by their place, among all ranks or those of a smaller group.
  std::vector<int> owners{};  // by gradient: place of the owner, with SumResult::owner
  int ranges = 1;             // number of equal ranges, with SumResult::ranges
  std::vector<int> places{};  // by rank; empty: the rank itself
  bool own_memory = false;    // sums get memory of their own (Bucket::kept); the bucket's is needed only until then
  bool consumed = false;      // sums are consumed within the step; buckets have memory only meanwhile
  bool two_stages = false;    // smaller groups sum first; the next stage sums their sums element by element
  bool trailer_rides = true;  // with SumResult::all_ranks: the trailer rides in the buckets

  // Buckets of gradients that are expected in `order`.
  std::vector<std::vector<size_t>> buckets(const std::vector<Gradient>& gradients, std::span<const size_t> order) const;
  // Layout of a bucket's gradients in its flat buffer.
  FlatLayout layout(std::span<const int64_t> numels, size_t element_bytes) const;
  // Whether every rank gets every sum whole.
  bool everywhere() const { return keeps == SumResult::all_ranks; }
  int place(int rank) const { return places.empty() ? rank : places[rank]; }
  // Range of the bucket's payload that holds the sum at a place after the reduction; other elements are undefined
  // there.
  Range kept(const Bucket& bucket, int place) const;
  // Whether a place keeps the whole sum of a bucket; also valid for a sparse gradient's bucket, which has no elements.
  bool keeps_whole(const Bucket& bucket, int place) const;
  // Whether the trailer needs a small collective of its own, on the CPU, at the end of a step: buckets do not carry it,
  // all gradients have 16 bits, which cannot hold a weight exactly, or some are on a device.
  bool trailer_apart(const std::vector<Gradient>& gradients) const;
  // Of a trailer apart: one that holds weights as exactly as the gradients.
  static at::ScalarType trailer_dtype(const std::vector<Gradient>& gradients);
};

// Layout of a flat buffer that splits into equal ranges for the ranks; ranges begin at the same elements in every dtype
// from 16 to 64 bits.
FlatLayout scatter_layout(std::span<const int64_t> numels, size_t element_bytes, int ranks);

}  // namespace shoal
