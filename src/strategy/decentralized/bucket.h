#pragma once
// Parameters that are mixed, updated and shown together.

#include <vector>

#include "layout/flat_layout.h"
#include "shoal/decentralized.h"

namespace shoal {

class GossipBucket {
 public:
  // as_views: the parameters move to memory that they share; else each keeps its own.
  GossipBucket(std::vector<NamedParameter> members, bool as_views);

  const std::vector<NamedParameter>& members() const { return members_; }
  int64_t numel() const { return layout_.size(); }
  at::ScalarType dtype() const { return dtype_; }
  // The parameters' memory [numel()], gaps included; none where each has its own.
  const at::Tensor& flat() const { return flat_; }
  // Flat memory [numel()] in the parameters' shapes.
  std::vector<at::Tensor> views_of(const at::Tensor& flat) const;

  // UsageError for a member that has another dtype or number of elements by now.
  void require_kinds() const;
  // Members that somebody has given other memory lie in flat() again, with the values that they have there.
  void adopt();
  // x <- own * x + others [numel()], whose memory is used.
  void mix(double own, at::Tensor& others);
  // flat [numel()] <- scale * x, the gaps untouched.
  void write_to(const at::Tensor& flat, double scale = 1) const;
  // x <- flat.
  void read_from(const at::Tensor& flat);

  std::unique_ptr<torch::optim::Optimizer> optimizer{};
  std::unique_ptr<torch::optim::LRScheduler> schedule{};

 private:
  std::vector<NamedParameter> members_;
  FlatLayout layout_;
  at::ScalarType dtype_;
  at::Tensor flat_;  // none where parameters keep their memory
};

}  // namespace shoal
