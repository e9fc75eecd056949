#pragma once
// Gradients that travel together, and the memory they travel in.

#include <vector>

#include "engine/buckets/bucket_plan.h"
#include "engine/buckets/spare_memory.h"
#include "engine/reducer/step_trailer.h"
#include "layout/flat_layout.h"
#include "shoal/group.h"

namespace shoal {

struct ReductionPlan;

// Flat memory of one dtype, [payload | trailer]:
//   payload   the members' gradients as the plan lays them out; nobody reads the gaps
//   trailer   of the members, where the reduction takes them everywhere
// A sparse gradient's bucket has no flat memory; the same flags and weight ride in the header of the sparse
// all-reduce. A bucket of which this rank keeps nothing after the step, or what it keeps lies apart, has memory only
// while it is needed.
class Bucket {
 public:
  Bucket(const std::vector<Gradient>& gradients, std::vector<size_t> members, const Group& group,
         const ReductionPlan& plan, bool with_trailer);

  const std::vector<size_t>& members() const { return members_; }
  bool sparse() const { return sparse_; }
  // Of those that are not sparse and leave at present, the last to do so.
  bool last() const { return last_; }
  void set_last(bool last) { last_ = last; }
  const std::string& names() const { return names_; }  // the first few, for labels
  const FlatLayout& layout() const { return layout_; }
  int64_t payload_numel() const { return layout_.size(); }

  // Gives the bucket memory if it has none, and takes it away; `keep`: it stays for the next time.
  void acquire(const Group& group, SpareMemory& spare);
  void release(SpareMemory& spare, bool keep);

  bool present() const { return present_; }
  // Whether this rank's memory of it comes and goes.
  bool passes() const { return passes_; }
  // The part of the sum that stays on this rank (ReductionPlan::kept).
  at::Tensor kept() const { return apart_.defined() ? apart_ : payload(kept_range_); }
  const Range& kept_range() const { return kept_range_; }
  at::Tensor& flat() { return flat_; }
  const at::Tensor& flat() const { return flat_; }
  at::Tensor payload(const Range& range) const { return flat_.narrow(0, range.begin, range.size()); }
  const at::Tensor& view(size_t place) const { return views_[place]; }  // gradient of members()[place]
  StepTrailer& trailer() { return trailer_; }
  const StepTrailer& trailer() const { return trailer_; }

 private:
  std::vector<size_t> members_;
  bool sparse_;
  bool last_ = false;
  bool with_trailer_;
  std::string names_;
  std::vector<at::Tensor> parameters_;
  at::TensorOptions options_;
  FlatLayout layout_;
  Range kept_range_;
  bool passes_ = false;
  bool present_ = false;
  at::Tensor memory_;  // of which flat_ is the first part
  at::Tensor flat_;
  at::Tensor apart_;
  std::vector<at::Tensor> views_;
  StepTrailer trailer_;
};

}  // namespace shoal
