#pragma once
// State of OSS.

#include <memory>
#include <set>
#include <unordered_map>
#include <vector>

#include "engine/sharded/parameter_buffer.h"
#include "engine/sharded/sharded_state.h"
#include "optim/param_groups.h"
#include "shoal/zero.h"

namespace shoal {

// The parameters that are trainable, or were, and who owns them. One that is frozen keeps its place, its owner and its
// state: it may be trainable again in the next step.
struct OSSShares {
  std::vector<at::Tensor> parameters{};
  std::vector<size_t> indices{};  // their places among all parameters of all param groups
  std::vector<size_t> param_groups{};
  std::vector<int> owners{};
  std::unordered_map<const c10::TensorImpl*, size_t> places{};

  using Pattern = std::vector<const c10::TensorImpl*>;
  Pattern trainable() const;  // those that are at present
};

struct OSSCore::State {
  Factory make;
  Group group;
  OSSOptions options;
  OSSShares shares{};
  std::vector<std::unique_ptr<ParameterBuffer>> buffers{};  // one per dtype and device
  std::unique_ptr<torch::optim::Optimizer> local{};         // its param groups match the whole optimizer's
  KnownParameters known{};
  int64_t step = 0;
  int64_t times_shared = 0;                     // how often shares were made
  std::set<OSSShares::Pattern> balanced_for{};  // what was trainable then

  Label label(const char* what) const { return {step, -1, what}; }

  // UsageError unless the whole optimizer's groups have the parameters that shares were made of.
  void require_known(const torch::optim::Optimizer& whole) const;
  // Those that are in `shares` keep their owner, unless trainable elements must move to be balanced.
  OSSShares share(const ParamGroups& groups) const;
  void choose_owners(OSSShares& made) const;
  // This rank's part of them, with the options of the groups.
  ParamGroups own_part(const ParamGroups& groups, const OSSShares& of) const;
  // The new shares and the optimizer of this rank's; state stays, or moves to the new owner. Collective.
  void take(OSSShares fresh, std::unique_ptr<torch::optim::Optimizer> optimizer);
  // Whether a parameter has become trainable that has no owner yet.
  bool lacks_trainable(const ParamGroups& groups) const;
  void move_states(const OSSShares& fresh, torch::optim::Optimizer& to);
  void fill_buffers();
  // Whether shares have been made with what is trainable now, or have been made anew often enough for its sake.
  bool is_balanced() const;
  // Whether shares must be made anew: a dtype or device has changed, or a parameter that was frozen is trainable;
  // UsageError for another shape.
  bool other_kinds(const ParamGroups& groups) const;
  // Values of parameters that others have replaced or written since the last step count from now on. Collective if there
  // are any; DisagreeError where ranks have other values.
  void adopt_values();
  std::vector<at::Tensor> own_gradients() const;
  // UsageError where no_sync has left gradients that are this rank's alone.
  void require_averaged() const;
  std::vector<StatePiece> pieces(const torch::nn::Module& module) const;
  // Every rank gets every share.
  void hand_out(const char* what);
  // The same, without what is frozen and has not changed. Collective.
  void hand_out_updates();
};

}  // namespace shoal
