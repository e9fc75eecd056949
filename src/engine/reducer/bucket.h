#pragma once
// Gradients that travel together, and the memory they travel in.

#include <vector>

#include "engine/reducer/bucket_plan.h"
#include "engine/reducer/facts.h"
#include "engine/reducer/spare_memory.h"
#include "layout/flat_layout.h"
#include "shoal/group.h"

namespace shoal {

class Exchange;

// Flat memory of one dtype, [payload | facts]:
//   payload   the members' gradients as the exchange lays them out; nobody reads the gaps
//   facts     of the members, where the exchange takes them everywhere
// A sparse gradient's bucket has no flat memory; the same facts ride in the header of the sparse exchange. A bucket of
// which this rank keeps nothing after the step, or what it keeps lies apart, has memory only while it is needed.
class Bucket {
 public:
  Bucket(const std::vector<Gradient>& gradients, std::vector<size_t> members, const Group& group,
         const Exchange& exchange, bool with_facts);

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
  // The part of the sum that stays on this rank (Exchange::kept).
  at::Tensor kept() const { return apart_.defined() ? apart_ : payload(kept_range_); }
  const Range& kept_range() const { return kept_range_; }
  at::Tensor& flat() { return flat_; }
  const at::Tensor& flat() const { return flat_; }
  at::Tensor payload(const Range& range) const { return flat_.narrow(0, range.begin, range.size()); }
  const at::Tensor& view(size_t place) const { return views_[place]; }  // gradient of members()[place]
  Facts& facts() { return facts_; }
  const Facts& facts() const { return facts_; }

 private:
  std::vector<size_t> members_;
  bool sparse_;
  bool last_ = false;
  bool with_facts_;
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
  Facts facts_;
};

}  // namespace shoal
