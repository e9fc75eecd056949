#pragma once
// Set of a reducer's buckets: where each gradient lies, which buckets are reduced, and the memory that they share.

#include <string>
#include <vector>

#include "engine/buckets/bucket.h"

namespace shoal {

// Position of a gradient within the buckets.
struct Place {
  size_t bucket;
  size_t index;
};

class BucketSet {
 public:
  // The references must outlive this object.
  BucketSet(const std::vector<Gradient>& gradients, const Group& group, const ReductionPlan& plan);
  BucketSet(const BucketSet&) = delete;
  BucketSet& operator=(const BucketSet&) = delete;

  // Builds buckets for gradients that arrive in `order`. Returns the former buckets that gradients still lie in; the
  // caller keeps them until those have moved. Usually there are none, so that old and new memory never exist together.
  [[nodiscard]] std::vector<Bucket> build(const std::vector<size_t>& order);
  // How often they have been built.
  int64_t builds() const { return builds_; }

  std::vector<Bucket>::const_iterator begin() const { return buckets_.begin(); }
  std::vector<Bucket>::const_iterator end() const { return buckets_.end(); }
  const std::vector<Place>& places() const { return places_; }
  size_t size() const { return buckets_.size(); }
  Bucket& operator[](size_t index) { return buckets_[index]; }
  const Bucket& operator[](size_t index) const { return buckets_[index]; }
  Bucket& of(size_t gradient) { return buckets_[places_[gradient].bucket]; }
  const Bucket& of(size_t gradient) const { return buckets_[places_[gradient].bucket]; }
  std::vector<at::Tensor> parameters_of(const Bucket& bucket) const;
  // The range of a bucket that each of the first `ranks` ranks keeps.
  std::vector<Range> owners_of(const Bucket& bucket, int ranks) const;

  // By bucket: names of the parameters, and bytes. first_bytes(): when they were built first.
  std::vector<std::vector<std::string>> names() const;
  std::vector<int64_t> bytes() const;
  const std::vector<int64_t>& first_bytes() const { return first_bytes_; }

  // The step's trailer, if it is reduced apart from the buckets; undefined if it rides in them.
  StepTrailer& trailer() { return trailer_; }
  const StepTrailer& trailer() const { return trailer_; }

  // Marks gradients of frozen parameters. Buckets with frozen gradients only rest: they are not reduced.
  void set_frozen(std::vector<bool> frozen);
  bool frozen(size_t gradient) const { return frozen_[gradient]; }
  bool all_frozen(size_t index) const;
  // Whether no bucket is reduced after this one.
  bool is_last(size_t index) const;
  // Whether any gradient is not frozen.
  bool any_trainable() const;

  // Gives the gradient's bucket memory and returns the gradient's view in it. Not for sparse gradients.
  const at::Tensor& acquire(size_t gradient);
  void leave_memory(size_t index) { buckets_[index].leave_memory(group_); }
  void acquire_bucket(size_t index) { buckets_[index].acquire(group_, spare_); }
  // Resets grad() of the bucket's gradients where it is a view of the bucket.
  void drop_gradients(size_t index);
  // Drops the gradients and frees the bucket's memory for the buckets that follow (see limit_spare()).
  void release(size_t index);
  void limit_spare(size_t most) { spare_.shrink(most); }
  void drop_spare() { spare_.clear(); }
  // Whether the gradient's bucket needs memory that neither it nor a bucket before it has left.
  bool needs_fresh_memory(size_t gradient) const;

 private:
  void mark_last();
  void make_memory_alike();

  const std::vector<Gradient>& gradients_;
  const Group& group_;
  const ReductionPlan& plan_;
  std::vector<Bucket> buckets_;
  int64_t builds_ = 0;
  std::vector<int64_t> first_bytes_;
  std::vector<Place> places_;  // by gradient
  std::vector<bool> frozen_;   // by gradient
  StepTrailer trailer_;
  // In shared memory, where fresh pages cost most. Still larger buffers are not used by smaller buckets, which would
  // keep the largest of a model in memory.
  static constexpr int64_t most_times_larger = 4;
  SpareMemory spare_{};
  bool keeps_transient_ = false;
};

}  // namespace shoal
