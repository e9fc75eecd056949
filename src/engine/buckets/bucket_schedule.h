#pragma once
// Buckets of one step on their way: which are full, which have left, and which have come back.

#include <chrono>
#include <optional>
#include <vector>

#include "engine/buckets/bucket_set.h"
#include "shoal/hooks.h"

namespace shoal {

// Buckets leave in their order, each when all its gradients are ready, and come back in their order.
class BucketSchedule {
 public:
  struct Limits {
    size_t in_flight = 4;  // of those whose memory is needed only until they are summed up
    // How long to wait at most for one of them to come back before another leaves; none: until it does. For ranks that
    // do other things together during backward: one that used other parameters may need this rank first.
    std::optional<std::chrono::milliseconds> patience{};
  };

  // The reference stays. patient: whether to wait at all.
  BucketSchedule(const BucketSet& buckets, const Limits& limits, bool patient);

  bool is_ready(size_t gradient) const { return ready_[gradient]; }
  void mark_ready(size_t gradient);

  // The bucket that leaves next; size() when all have left.
  size_t next() const { return next_; }
  bool next_is_full() const { return next_ < buckets_.size() && missing_[next_] == 0; }
  // It has left, or rests.
  void pass_next();
  void set_sum(size_t index, PendingExchange sum) { sums_[index] = std::move(sum); }

  // The oldest bucket that has left and come back since, once. Waits while more are in flight than may be, so that
  // memory stays bounded. all: waits until every one has come back.
  std::optional<size_t> take_back(bool all);
  // While buckets travel, one more fills, which takes the memory of one that has come back: of so many at most.
  size_t most_spare(bool one_more) const;

  // By bucket.
  std::vector<PendingExchange>& sums() { return sums_; }

 private:
  bool passes(size_t index) const { return buckets_[index].passes() && !buckets_.rests(index); }
  bool comes_in_time(Work& work);

  const BucketSet& buckets_;
  Limits limits_;
  bool patient_;                 // no bucket was waited for in vain
  std::vector<bool> ready_;      // by gradient: handed to its bucket
  std::vector<size_t> missing_;  // by bucket: gradients not ready
  std::vector<PendingExchange> sums_;
  size_t next_ = 0;
  size_t back_ = 0;  // buckets that have been taken back
  size_t in_flight_ = 0;
};

}  // namespace shoal
