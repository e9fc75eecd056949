#pragma once
// Schedule of one step's buckets: which are full, which are being reduced, and which have been reduced.

#include <chrono>
#include <optional>
#include <vector>

#include "engine/buckets/bucket_set.h"
#include "shoal/hooks.h"

namespace shoal {

// Buckets are reduced in their order, each once all its gradients are ready, and complete in the same order.
class BucketSchedule {
 public:
  struct Limits {
    size_t in_flight = 4;  // limit for buckets whose memory is needed only until they are reduced
    // Longest wait for a bucket to complete before the next one is issued; none: until it completes. Set where ranks
    // exchange other things during backward: a rank that used other parameters may need this one first.
    std::optional<std::chrono::milliseconds> patience{};
  };

  // The reference must outlive this object. may_wait: whether to wait at all.
  BucketSchedule(const BucketSet& buckets, const Limits& limits, bool may_wait);

  bool is_ready(size_t gradient) const { return ready_[gradient]; }
  void mark_ready(size_t gradient);

  // The bucket to be issued next; size() when all have been.
  size_t next() const { return next_; }
  bool next_is_full() const { return next_ < buckets_.size() && missing_[next_] == 0; }
  // Call after the next bucket was issued or skipped as frozen.
  void pass_next();
  void set_sum(size_t index, PendingExchange sum) { sums_[index] = std::move(sum); }

  // The oldest bucket that was issued and has been reduced since; each is returned once. Waits while more buckets are
  // in flight than the limit, which bounds memory. all: waits for every bucket. The caller completes its sum.
  std::optional<size_t> take_back(bool all);
  // Waits for the oldest bucket in flight, `limit` at most; none if ranks may use different gradients.
  void await_oldest(std::chrono::microseconds limit);
  // Number of spare buffers worth keeping. one_more: for one more bucket, which fills while others are in flight.
  size_t most_spare(bool one_more) const;

  // By bucket.
  std::vector<PendingExchange>& sums() { return sums_; }

 private:
  bool transient(size_t index) const { return buckets_[index].transient() && !buckets_.all_frozen(index); }
  bool comes_in_time(Work& work);

  const BucketSet& buckets_;
  Limits limits_;
  bool may_wait_;                // false once a wait has timed out
  std::vector<bool> ready_;      // by gradient: written to its bucket
  std::vector<size_t> missing_;  // by bucket: number of gradients that are not ready
  std::vector<PendingExchange> sums_;
  size_t next_ = 0;
  size_t back_ = 0;  // number of buckets returned by take_back()
  size_t in_flight_ = 0;
};

}  // namespace shoal
