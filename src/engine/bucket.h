#pragma once
// Gradients that travel together, and the memory they travel in.

#include <optional>
#include <vector>

#include "engine/bucket_plan.h"
#include "shoal/comm/group.h"
#include "shoal/layout/flat_layout.h"

namespace shoal {

// Flat memory of one dtype, [payload | used flags | weight]:
//   payload   the members' gradients, each piece aligned to 128 bytes, gaps zero
//   flags     one element per member: 1 when this rank used it in the step; the sum counts the ranks that did
//   weight    this rank's weight in the mean; the sum is what the payload is divided by
// The tail rides in the same collective, so that unused parameters, weights and abandoned steps (a weight of NaN) cost
// no communication of their own. A sparse gradient's bucket has no flat memory; the same facts ride in the header of
// the sparse exchange.
class Bucket {
 public:
  Bucket(const std::vector<Gradient>& gradients, std::vector<size_t> members, const Group& group);
  // Without members: carries just the weight in float32, for models whose other buckets are too coarse for it.
  static Bucket weight_only(const Group& group);

  const std::vector<size_t>& members() const { return members_; }
  bool sparse() const { return sparse_; }
  // Whether the weight survives in this dtype: 16-bit floats cannot count tokens.
  bool exact_weight() const;
  const std::string& names() const { return names_; }  // the first few, for labels

  at::Tensor& flat() { return flat_; }
  at::Tensor payload() const;
  const at::Tensor& view(size_t place) const { return views_[place]; }  // gradient of members()[place]

  void write_tail(const std::vector<bool>& used, double weight);
  double weight() const;
  // How many ranks used each member, after the reduction.
  std::vector<bool> used_anywhere() const;

 private:
  Bucket() = default;
  void allocate(const Group& group, int64_t payload, const at::TensorOptions& options);

  std::vector<size_t> members_;
  bool sparse_ = false;
  std::string names_;
  int64_t payload_ = 0;
  at::Tensor flat_;
  std::vector<at::Tensor> views_;
};

}  // namespace shoal
