#pragma once
// Bucket of gradients that are reduced together, and its memory.

#include <algorithm>
#include <vector>

#include "engine/buckets/bucket_plan.h"
#include "engine/buckets/spare_memory.h"
#include "engine/buckets/step_trailer.h"
#include "layout/flat_layout.h"
#include "shoal/group.h"

namespace shoal {

struct ReductionPlan;

// Flat buffer of one dtype, [payload | trailer]:
//   payload   the members' gradients as the plan lays them out; the gaps between them are never read
//   trailer   the members' StepTrailer, if the trailer rides in the buckets
// A sparse gradient's bucket has no flat buffer; the sparse all-reduce carries the flags and the weight in its header.
// A transient bucket (one whose reduced values leave it) has memory only while it is needed.
class Bucket {
 public:
  Bucket(const std::vector<Gradient>& gradients, std::vector<size_t> members, const Group& group,
         const ReductionPlan& plan, bool with_trailer);

  const std::vector<size_t>& members() const { return members_; }
  bool sparse() const { return sparse_; }
  // The last bucket to be reduced among those that are dense and not frozen.
  bool last() const { return last_; }
  void set_last(bool last) { last_ = last; }
  const std::string& names() const { return names_; }  // names of the first few, for labels
  const FlatLayout& layout() const { return layout_; }
  int64_t payload_numel() const { return layout_.size(); }
  // Elements of the flat buffer.
  int64_t numel() const { return payload_numel() + (with_trailer_ ? StepTrailer::numel(members_.size()) : 0); }
  at::TensorOptions options() const { return options_.requires_grad(false); }

  // acquire() gives the bucket memory if it has none; release() takes it away, unless `keep`: then it stays for the
  // next step.
  void acquire(const Group& group, SpareMemory& spare);
  // Makes acquire() take fresh memory of at least this many elements, so that other buckets can use it afterwards.
  void set_least_numel(int64_t numel) { least_numel_ = numel; }
  int64_t least_numel() const { return least_numel_; }
  void release(SpareMemory& spare, bool keep);

  // Whether the program has tensors or arrays in the memory, beside `gradients` tensors of grad().
  bool kept_by_program(size_t gradients) const { return flat_.storage().use_count() > own_uses_ + gradients; }
  // Whether the program has resized the storage of grad().
  bool lost_memory() const { return flat_.storage().nbytes() < flat_.nbytes(); }
  // Leaves the memory to those who keep it, and goes on in a copy, where the caller moves grad().
  void leave_memory(const Group& group);

  bool present() const { return present_; }
  // Whether the bucket's memory is needed only until the bucket has been reduced.
  bool transient() const { return transient_; }
  // The part of the sum that this rank keeps (ReductionPlan::kept).
  at::Tensor kept() const { return kept_memory_.defined() ? kept_memory_ : payload(kept_range_); }
  const Range& kept_range() const { return kept_range_; }
  at::Tensor& flat() { return flat_; }
  const at::Tensor& flat() const { return flat_; }
  at::Tensor payload(const Range& range) const { return flat_.narrow(0, range.begin, range.size()); }
  const at::Tensor& view(size_t place) const { return views_[place]; }  // the gradient of members()[place]
  // Whether that tensor has been moved out of the bucket: where it is grad() itself, by a conversion of the module
  // (channels-last).
  bool moved(size_t place) const;
  void renew_view(size_t place);
  // A tensor without memory of that gradient's sizes and strides. They stay where a parameter gets others
  // (channels-last): ranks add up what they have laid out in different steps, and the one that keeps the sum did so
  // first.
  const at::Tensor& like(size_t place) const { return likes_[place]; }
  StepTrailer& trailer() { return trailer_; }
  const StepTrailer& trailer() const { return trailer_; }

 private:
  void lay_out_in(at::Tensor memory);

  std::vector<size_t> members_;
  bool sparse_;
  bool last_ = false;
  bool with_trailer_;
  int64_t least_numel_ = 0;
  std::string names_;
  std::vector<at::Tensor> likes_;
  at::TensorOptions options_;
  FlatLayout layout_;
  Range kept_range_;
  bool transient_ = false;
  bool present_ = false;
  at::Tensor memory_;    // allocation whose first part is flat_
  size_t own_uses_ = 0;  // tensors of this bucket in that memory
  at::Tensor flat_;
  at::Tensor kept_memory_;
  std::vector<at::Tensor> views_;
  StepTrailer trailer_;
};

}  // namespace shoal
