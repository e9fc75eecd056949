#pragma once
// State of OSS.

#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "engine/changes/changed_values.h"
#include "engine/elastic/seen_gradient.h"
#include "engine/sharded/outdated_parameters.h"
#include "engine/sharded/parameter_buffer.h"
#include "engine/sharded/sharded_optimizer_state.h"
#include "module/walk.h"
#include "shoal/zero.h"
#include "strategy/zero/second_gradients.h"

namespace shoal {

// The parameters that are trainable, or were, and who owns them. One that is frozen keeps its place, its owner and its
// state: it may be trainable again in the next step.
struct OSSShares {
  std::vector<at::Tensor> parameters{};
  std::vector<size_t> indices{};  // their places among all parameters of all param groups
  std::vector<int> owners{};
  std::unordered_map<const c10::TensorImpl*, size_t> places{};

  using Pattern = std::vector<const c10::TensorImpl*>;
  Pattern trainable() const;                           // those that are at present
  size_t place_of(const at::Tensor& parameter) const;  // UsageError for an unknown parameter
  std::optional<int> owner_of(const at::Tensor& parameter) const;
  std::vector<NamedTensor> named() const;  // "parameter 3"
};

// Of a wrapper that reduces gradients for an optimizer, which may outlive it.
struct WrapperLife {
  std::function<int64_t()> steps{};  // reduced so far; empty once the wrapper has ended
  int64_t reduced = 0;               // when it ended
  int64_t updated = 0;               // of these, those that the optimizer has taken
  bool optimizer_ended = false;      // one of its optimizers
};

// What a rank is the second owner of, and what it needs for that.
struct SecondShards {
  std::vector<int> owners{};      // by rank, the second owner of what it owns; empty: there is none
  OutdatedParameters outdated{};  // between an update and its publication
  std::vector<int> changed{};     // by buffer, whether the last update may have changed it
  // Their gradients, where the wrapper reduces to owners; nullptr: all ranks have all gradients.
  std::shared_ptr<SecondGradients> gradients{};
  std::vector<SeenGradient> seen{};             // in the commit, of what this rank owns
  std::vector<EarlierSums::Remains> remains{};  // then, with `gradients`
  bool written = false;                         // the program's values were adopted since the last update
};

// Ownership by tensor.
struct OSSCore::State : ShardedOptimizerBase::State {
  OSSOptions options{};
  OSSShares shares{};
  OSSShares next{};                                         // of the groups that shares_of() was asked about
  std::vector<std::unique_ptr<ParameterBuffer>> buffers{};  // one per dtype and device
  int64_t times_shared = 0;                                 // how often shares were made
  std::set<OSSShares::Pattern> balanced_for{};              // what was trainable when they were balanced
  std::optional<int> owners{};  // so many ranks of the group, the first ones, own parameters; none: all
  // Frozen ones that get an owner all the same: a checkpoint has state of them.
  std::unordered_set<const c10::TensorImpl*> owned_though_frozen{};
  bool anew = false;                           // the next shares do not keep any owner
  std::optional<ParameterWatch> lone_watch{};  // in a group of one rank, which has no buffers
  SecondShards second_shards{};
  std::shared_ptr<WrapperLife> wrapper{};  // of the ShardedDataParallel that reduces the gradients, if there was one
  bool may_move = true;  // owners may change; false between a backward, which leaves gradients with them, and its step

  using ShardedOptimizerBase::State::State;
  ~State() override;
  // Those that are in `shares` keep their owner, unless owners may move and trainable elements must, to be balanced.
  ParamGroups shares_of(const ParamGroups& groups) override;
  // State stays, or moves to the new owner.
  void take_shares(std::unique_ptr<torch::optim::Optimizer> made) override;
  // Whether a dtype or device has changed, or a parameter that was frozen is trainable; UsageError for another shape.
  bool must_share_again(const ParamGroups& groups) const override;
  void adopt_values() override;
  // DisagreeError if gradients of parameters in no wrapped module differ between ranks. Collective if there are such.
  void agree_on_gradients() const override;
  std::vector<at::Tensor> take_gradients() override;
  std::vector<at::Tensor> counted_gradients() const override;
  bool shared() const override;
  // Without what is frozen and has not changed.
  void publish() override;
  // In the order of the ranks' optimizers.
  UpdateTargets shared_targets(const ParamGroups& groups) override;
  // Also in a group without shares.
  bool apart() const override { return group.size() > 1 && group.transport() != "host"; }
  ParamGroups enable_second_owners(const ParamGroups& groups) override;
  std::vector<at::Tensor> disable_second_owners() override;
  ParamGroups own_part(const ParamGroups& groups) override;
  std::vector<ShardSource::Shard> shards() const override;
  ShardNames shard_names() const override;
  bool is_written() const override { return second_shards.written || has_new_values(); }
  void adopt_alone() override;
  void check_second_owners() override;
  void step_owned() override;
  void publish_deferred_update() override;
  void end_outdated() override { second_shards.outdated.end(); }
  void seal_gradients() override;
  void require_sealed() const override;
  std::string advice_on_groups() const override;
  std::string advice_on_adding(const std::vector<at::Tensor>& parameters) const override;

  // Publishes the buffers for which `changed` is set; empty: all. Collective.
  void hand_out(const Label& label, const std::vector<int>& changed = {});
  // Of an update. Whether a buffer of what is frozen has changed, ranks ask each other. Collective.
  void hand_out_update(std::vector<int> changed, const Label& label);
  // Where a wrapper over `all` has this optimizer by host, and so many ranks of each host, fewer than some hosts have
  // if not `equal`, own parameters. UsageError for options that hosts do not share; DisagreeError if hosts differ in
  // others. Collective over `all`.
  void replicate(const Group& all, int ranks, bool equal, OSSCore& optimizer);
  // Whether parameters were written or replaced here since the last step, other than by the optimizers.
  bool has_new_values() const;
  // Of all parameters, for agree_on_values().
  std::vector<ChangedValue> values() const;
  // Whether the parameter has become trainable, or is in owned_though_frozen, and has no owner yet.
  bool lacks_owner(const at::Tensor& parameter) const;
  // Whether one of them does.
  bool lacks_trainable(const ParamGroups& groups) const;
  // Whether shares have been made with what is trainable now, or have been made anew often enough for its sake, or must
  // stay.
  bool is_balanced() const;
  std::vector<StatePiece> pieces(const torch::nn::Module& module) const override;
  // Owners and buffers of the group. Collective.
  void divide_anew();
  // For errors, such as "3 [16, 5]".
  std::string describe(const at::Tensor& parameter) const;

 private:
  // Calls visit(place, owner) for what this rank's optimizer updates.
  template <class Visit>
  void for_owned(const Visit& visit) const {
    for (size_t place = 0; place < shares.parameters.size(); ++place) {
      const int owner = shares.owners[place];
      const bool second =
          !second_shards.owners.empty() && second_shards.owners[static_cast<size_t>(owner)] == group.rank();
      if (owner == group.rank() || second) visit(place, owner);
    }
  }
  // Whether grad() is a tensor without memory, in whose place the optimizer takes a copy of the owner's.
  bool has_stand_in(size_t place, int owner) const;
  // What the optimizer takes for one of them.
  at::Tensor gradient_of(size_t place, int owner) const;
  // By buffer, whether this rank's update may have changed it; updated: there was one.
  std::vector<int> changed_buffers(bool updated) const;
  void begin_outdated();
  // UsageError if gradients come from no wrapper any more, or from one by which groups of ranks train apart.
  void require_wrapper() const;
  // Before values of parameters that have other memory (set_data) are adopted.
  void separate_replaced() const;
  // UsageError that names what would need other shares.
  [[noreturn]] void refuse_new_shares(const ParamGroups& groups);
  void choose_owners(OSSShares& made) const;
  void move_states(torch::optim::Optimizer& to);
  void fill_buffers();
};

}  // namespace shoal
