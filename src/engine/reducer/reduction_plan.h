#pragma once
// Description of how a strategy reduces gradients: which travel together, who keeps what of their sum, and where a
// step's trailer rides.

#include "engine/buckets/bucket.h"
#include "shoal/hooks.h"

namespace shoal {

struct BucketCaps {
  int64_t first_bytes = 1 << 20;
  int64_t bytes = 25 << 20;
  std::optional<int64_t> most_numel{};  // elements that no bucket exceeds, unless a single gradient does
};

// The sum that a communication hook takes over.
struct HookPoint {
  Group group;
  SumFor sum_for = SumFor::everybody;
  bool of_kept = false;  // of what a sum in a smaller group has left in Bucket::kept, not of the bucket
};

// Equal on all ranks.
struct ReductionPlan {
  enum class Keeps {
    everything,  // every rank has every sum
    owned,       // of each bucket, one rank has the sum
    ranges,      // of each bucket, every rank has an equal range of the sum, whatever gradients it cuts
  };

  HookPoint hook_point;
  Keeps keeps = Keeps::everything;

  // Buckets.
  BucketCaps caps{};
  bool follows_order = true;   // gradients come in the order in which they arrive; else as registered, last first
  std::vector<int> divided{};  // by gradient: those with different numbers share no bucket; empty: all may

  // Sums. Ranks that keep one together are numbered by their place: all of them, or those of a smaller group.
  std::vector<int> owners{};  // by gradient: the place that keeps it, where sums are owned
  int ranges = 1;             // how many, where ranks have equal ranges
  std::vector<int> places{};  // by rank; empty: its own number
  bool own_memory = false;    // sums go to memory of their own (Bucket::kept): the bucket's is needed only until then
  bool used_up = false;       // sums are used up within the step: buckets have memory only meanwhile
  bool two_stages = false;    // smaller groups add up first; what is further adds up their sums, each by its element
  bool trailer_rides = true;  // where every rank has every sum: the trailer rides in the buckets

  // Buckets of gradients, given the order in which they are expected.
  std::vector<std::vector<size_t>> buckets(const std::vector<Gradient>& gradients, std::span<const size_t> order) const;
  // Where the gradients of a bucket lie in its memory.
  FlatLayout layout(std::span<const int64_t> numels, size_t element_bytes) const;
  // Whether every rank gets every sum whole.
  bool everywhere() const { return keeps == Keeps::everything; }
  int place(int rank) const { return places.empty() ? rank : places[rank]; }
  // Elements of the bucket's payload that hold the sum, at a place, afterwards; the others are void there.
  Range kept(const Bucket& bucket, int place) const;
  // Whether a place keeps all of a bucket's sum; also for a sparse gradient's bucket, which has no elements.
  bool keeps_whole(const Bucket& bucket, int place) const;
  // Whether the trailer takes a small collective of its own at the end of a step: where buckets do not carry it, and
  // where all gradients have 16 bits, which cannot carry a weight exactly.
  bool trailer_apart(const std::vector<Gradient>& gradients) const;
};

// Memory that splits into equal ranges for the ranks, which begin at the same elements in every dtype from 16 to 64
// bits.
FlatLayout scatter_layout(std::span<const int64_t> numels, size_t element_bytes, int ranks);

}  // namespace shoal
