#pragma once
// State of ShardedOptimizerCore.

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/sharded/sharded_module.h"
#include "optim/param_groups.h"
#include "shoal/detail/sharded_optimizer.h"

namespace shoal {

struct ShardedOptimizerCore::State {
  std::string name;  // of the class, for errors
  Group group;
  std::optional<Group> everybody{};  // where several groups have equal pieces: all of them
  std::vector<std::shared_ptr<ShardedModule>> modules{};
  double clip_grad = 0;                // 0: no clipping
  bool log_num_zeros_in_grad = false;  // count the gradients' elements that are zero
  bool wait_at_first_touch = false;    // for the other ranks' pieces; else in step()
  std::optional<GradScaler> scaler{};
  std::shared_ptr<Timers> timers{};
  // Norms, inf and counts are added up over these groups, one after the other; none: over `group`.
  std::vector<Group> scalar_groups{};

  std::unique_ptr<torch::optim::Optimizer> local{};  // its param groups match the whole optimizer's
  KnownParameters known{};
  int64_t steps = 0;

  // Of the step to come, from clip_grad_norm() or step() on: what the optimizer sees, without the loss's scale.
  std::optional<int64_t> collected{};  // after so many reductions
  std::vector<at::Tensor> seen{};
  bool finite = true;  // no rank has inf or NaN
  bool met = false;    // the step in progress has asked all ranks something, so that all are in it

  Label label(const std::string& what) const { return {steps, -1, what}; }
  template <class Act>
  void time(const char* what, int level, const Act& act, const Group* meet = nullptr) const {
    timed(timers.get(), what, level, act, meet);
  }
  template <class Visit>
  void for_pieces(const Visit& visit) const {
    for (const auto& module : modules) {
      for (auto& piece : module->pieces()) visit(*module, piece);
    }
  }
  // UsageError unless the whole optimizer's groups have the parameters that it was made for.
  void require_known(const std::vector<torch::optim::OptimizerParamGroup>& groups) const;
  std::vector<Group> groups_of_scalars() const {
    return scalar_groups.empty() ? std::vector<Group>{group} : scalar_groups;
  }
  // This step's gradients of the pieces that norms and counts are about.
  std::vector<at::Tensor> counted_gradients() const;
  // Pieces are about to change, which the other ranks may read until they enter their own step. What the step has asked
  // all ranks already has been such a meeting. Collective.
  void await_readers() const;
  // Pieces of all ranks; with several modules, names begin with "chunk0.", "chunk1.", ...
  std::vector<StatePiece> state_pieces() const;
};

}  // namespace shoal
