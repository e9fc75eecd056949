#pragma once
// Bucket of parameters that are mixed, updated and shown together.

#include <vector>

#include "layout/flat_layout.h"
#include "shoal/decentralized.h"

namespace shoal {

// Gives the parameter a storage of its own, whose memory can move later, and returns a tensor on it: other tensors on
// this storage, such as the parameter's data(), follow.
at::Tensor home_of(const at::Tensor& parameter);

class GossipBucket {
 public:
  // homes: of the members, which lie there (see home_of) and whose memory moves to one flat buffer; none: each keeps
  // its own memory.
  explicit GossipBucket(std::vector<NamedParameter> members, std::vector<at::Tensor> homes = {});

  const std::vector<NamedParameter>& members() const { return members_; }
  int64_t numel() const { return layout_.size(); }
  at::ScalarType dtype() const { return dtype_; }
  // The parameters' flat buffer [numel()], gaps included; undefined if each keeps its own memory.
  const at::Tensor& flat() const { return flat_; }
  // Views of a flat tensor [numel()] in the parameters' shapes.
  std::vector<at::Tensor> views_of(const at::Tensor& flat) const;

  // UsageError if a member's dtype or number of elements has changed.
  void require_kinds() const;
  // Moves members whose memory was replaced back to flat(), with their present values. None may be on another's memory.
  // Where PyTorch has moved memory in place, for other processes (share_memory()), members keep to their own from then
  // on.
  void adopt();
  // x <- own * x + others [numel()]. Overwrites `others`.
  void mix(double own, at::Tensor& others);
  // Where its parameters are; neighbours exchange memory of the CPU.
  at::Device device() const { return members_.front().parameter.device(); }
  // flat [numel()] <- scale * x, except the gaps.
  void write_to(const at::Tensor& flat, double scale = 1) const;
  // x <- flat.
  void read_from(const at::Tensor& flat);

  std::unique_ptr<torch::optim::Optimizer> optimizer{};
  std::unique_ptr<torch::optim::LRScheduler> schedule{};

 private:
  bool any_moved() const;

  std::vector<NamedParameter> members_;
  std::vector<at::Tensor> homes_;
  FlatLayout layout_;
  at::ScalarType dtype_;
  at::Tensor flat_;  // undefined if parameters keep their own memory
};

}  // namespace shoal
