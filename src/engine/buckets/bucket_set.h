#pragma once
// Buckets of all gradients of a reducer: where each gradient lies, which of them travel, and the memory that they hand
// to each other.

#include <vector>

#include "engine/buckets/bucket.h"

namespace shoal {

// Where a gradient lies among buckets.
struct Place {
  size_t bucket;
  size_t index;
};

class BucketSet {
 public:
  // The references stay.
  BucketSet(const std::vector<Gradient>& gradients, const Group& group, const ReductionPlan& plan);
  BucketSet(const BucketSet&) = delete;
  BucketSet& operator=(const BucketSet&) = delete;

  // Gradients are expected in that order. Returns former buckets that gradients lie in yet: to be kept until they have
  // moved. Usually none do, and then old and new never exist together.
  [[nodiscard]] std::vector<Bucket> build(const std::vector<size_t>& order);

  const std::vector<Bucket>& all() const { return buckets_; }
  const std::vector<Place>& places() const { return places_; }
  size_t size() const { return buckets_.size(); }
  Bucket& operator[](size_t index) { return buckets_[index]; }
  const Bucket& operator[](size_t index) const { return buckets_[index]; }
  Bucket& of(size_t gradient) { return buckets_[places_[gradient].bucket]; }
  const Bucket& of(size_t gradient) const { return buckets_[places_[gradient].bucket]; }
  // The step's trailer, where it does not ride in the buckets; undefined where it does.
  StepTrailer& trailer() { return trailer_; }
  const StepTrailer& trailer() const { return trailer_; }

  // Gradients that do not come until further notice. Buckets of theirs alone rest: they do not travel.
  void set_frozen(std::vector<bool> frozen);
  bool frozen(size_t gradient) const { return frozen_[gradient]; }
  bool rests(size_t index) const;
  // Whether any gradient comes.
  bool any_travels() const;

  // The gradient's place, in memory that its bucket has from now on. Not for sparse gradients.
  const at::Tensor& acquire(size_t gradient);
  void acquire_bucket(size_t index) { buckets_[index].acquire(group_, spare_); }
  // Gradients that lie in the bucket are dropped: not a stand-in, nor one that nobody has used.
  void drop_gradients(size_t index);
  // Drops them, and gives up the memory, of which so much as `spare` is kept for the buckets that follow.
  void release(size_t index);
  void limit_spare(size_t most) { spare_.shrink(most); }
  void drop_spare() { spare_.clear(); }

 private:
  void mark_last();

  const std::vector<Gradient>& gradients_;
  const Group& group_;
  const ReductionPlan& plan_;
  std::vector<Bucket> buckets_;
  std::vector<Place> places_;  // by gradient
  std::vector<bool> frozen_;   // by gradient
  StepTrailer trailer_;
  SpareMemory spare_;
  bool keeps_passing_ = false;
};

}  // namespace shoal
