#pragma once
// Updated parameters and optimizer state in memory that the ranks of a host share.

#include <torch/optim/optimizer.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "optim/state.h"
#include "shoal/detail/range.h"

namespace shoal {

// A tensor that a rank's optimizer updates: a parameter, or the elements of it that the rank owns.
struct UpdateTarget {
  at::Tensor values;       // in memory that all ranks of the host map; dense
  size_t param_group = 0;  // of the optimizer
  at::Tensor parameter{};
  Range range{};         // its elements, in memory order
  at::Tensor rounded{};  // where `values` are float32 copies: the parameter's own elements, one-dimensional

  // Whether both concern some element of one parameter.
  bool overlaps(const UpdateTarget& other) const {
    return parameter.is_same(other.parameter) && (range == other.range || !range.intersect(other.range).empty());
  }
};

// The state that an optimizer has of what it updates; nothing if there is none.
std::optional<NamedState> state_of(const torch::optim::Optimizer& local, const at::Tensor& values);

// By rank of the group.
using UpdateTargets = std::vector<std::vector<UpdateTarget>>;

// Values and state by what owns them, to be read by elements, whoever owns those.
class HeldState {
 public:
  virtual ~HeldState() = default;

  virtual const UpdateTargets& targets() const = 0;
  // The state of a rank's target, with tensors that are shared with it; nothing if there is none.
  virtual std::optional<NamedState> state(int rank, size_t target) const = 0;

  // The state of the elements of `target`. UsageError for state that is not element by element and would have to be
  // cut, and for a parameter that no rank has.
  std::optional<NamedState> state_of(const UpdateTarget& target) const;
  // Copies the values of its elements to `target.values`.
  void copy_values(const UpdateTarget& target) const;
  // Whether float32 copies of the parameter are updated.
  bool has_copies_of(const at::Tensor& parameter) const;

 private:
  template <class Visit>
  void for_overlaps(const UpdateTarget& target, const Visit& visit) const;
};

// Those of one rank that has no others beside it.
class LoneState : public HeldState {
 public:
  LoneState(UpdateTargets targets, std::shared_ptr<torch::optim::Optimizer> local)
      : targets_(std::move(targets)), local_(std::move(local)) {}

  const UpdateTargets& targets() const override { return targets_; }
  std::optional<NamedState> state(int rank, size_t target) const override;

 private:
  UpdateTargets targets_;  // of rank 0 alone
  std::shared_ptr<torch::optim::Optimizer> local_;
};

}  // namespace shoal
