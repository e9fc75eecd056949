#pragma once
// State of a sharded optimizer, and what each rank owns.

#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/elastic/guarded_update.h"
#include "engine/sharded/second_owners.h"
#include "engine/sharded/sharded_state.h"
#include "optim/param_groups.h"
#include "shoal/detail/sharded_optimizer.h"
#include "shoal/telemetry.h"

namespace shoal {

struct SecondOwnerCheck;

// The virtual functions are about ownership: by range (ShardedOptimizerCore::State) or by tensor (OSSCore::State).
struct ShardedOptimizerBase::State {
  std::string name;  // of the class, for errors
  Group group;
  std::optional<Group> everybody{};    // where several groups own the same, or average in an elastic job: all of them
  double clip_grad = 0;                // 0: no clipping
  bool log_num_zeros_in_grad = false;  // count the gradients' elements that are zero
  bool wait_at_first_touch = false;    // for the other ranks' values; else in step()
  std::optional<GradScaler> scaler{};
  std::shared_ptr<Timers> timers{};
  // Norms, inf and counts are added up over these groups, one after the other; none: over `group`.
  std::vector<Group> scalar_groups{};

  OptimizerFactory make{};
  bool element_wise = false;                         // the local optimizer
  std::shared_ptr<torch::optim::Optimizer> local{};  // its param groups match the whole optimizer's
  KnownParameters known{};
  int64_t steps = 0;
  std::optional<bool> finite{};  // no rank has inf or NaN in the gradients, which are unscaled; none: not asked yet
  std::unique_ptr<GuardedUpdate> guarded{};  // in an elastic job of several ranks
  std::unique_ptr<LoneState> alone{};        // of one rank whose job has just changed to several, until all have theirs
  std::optional<SecondOwners> second_owners{};  // in an elastic job of several ranks that share no memory
  // Of a step in an elastic job.
  struct Commit {
    std::optional<StepResult> prepared{};  // what the step will return, if it is updated
    GossipTerms mixed_in{};                // by what this rank updates
    bool lone = false;     // this rank is alone on its host, beside others: its steps have a commit, and need no guard
    bool passed = false;   // of a lone rank, and where shares have second owners
    bool refused = false;  // by step(), before it changed anything
    uint64_t options = 0;  // digest of the options, where shares have second owners
    bool computes_shares = false;  // Elastic computes one share of the batch after the other
  };
  Commit commit{};
  struct Agreement {
    bool met = false;                  // the step in progress has asked all ranks something, so that all are in it
    std::optional<uint64_t> loaded{};  // digest of a state that load_state_dict() got since the last step
  };
  Agreement agreement{};

  State(std::string name, Group group) : name(std::move(name)), group(std::move(group)) {}
  virtual ~State() = default;

  // This rank's part of the groups. UsageError for groups that cannot be divided.
  virtual ParamGroups shares_of(const ParamGroups& groups) = 0;
  // `made` updates what shares_of() has returned last. Collective.
  virtual void take_shares(std::unique_ptr<torch::optim::Optimizer> made) { local = std::move(made); }
  // Whether the groups must be divided anew, since parameters have changed.
  virtual bool must_share_again(const ParamGroups& /*groups*/) const { return false; }
  // Values that the user has loaded, replaced or written since the last step count from now on. Collective if there are
  // any. DisagreeError if ranks have different values, UsageError for other changes that ownership does not support.
  virtual void adopt_values() = 0;
  virtual void begin_step() {}
  // Before gradients are taken for an update. Not between the commit and the update of an elastic job. Collective.
  virtual void agree_on_gradients() const {}
  // This step's gradients as the local optimizer will see them. Resets `finite`, unless they are unscaled already.
  // UsageError for gradients that a step cannot use; nothing has changed then.
  virtual std::vector<at::Tensor> take_gradients() = 0;
  // Those that norms and counts are about.
  virtual std::vector<at::Tensor> counted_gradients() const = 0;
  // Whether other ranks see this rank's values change as they are written.
  virtual bool shared() const = 0;
  // All ranks get what this one has updated. Collective.
  virtual void publish() = 0;
  virtual void end_step(bool /*scaled*/) {}
  // What each rank updates, where all ranks share its memory. Moves there what does not lie there yet. Collective.
  virtual UpdateTargets shared_targets(const ParamGroups& groups) = 0;
  // Pieces of all ranks, those of a parameter one after the other; `module` may name them.
  virtual std::vector<StatePiece> pieces(const torch::nn::Module& module) const = 0;
  // What to do instead of changing the param groups or adding parameters, for errors.
  virtual std::string advice_on_groups() const = 0;
  virtual std::string advice_on_adding(const std::vector<at::Tensor>& parameters) const = 0;

  // In an elastic job: what all ranks have updated, and their state. A lone rank's, unlike others', is that at the
  // first call.
  const HeldState& held(const ParamGroups& groups);
  Label label(const std::string& what) const { return {steps, -1, what}; }
  template <class Act>
  void time(const char* what, int level, const Act& act, const Group* meet = nullptr) const {
    timed(timers.get(), what, level, act, meet);
  }
  std::vector<Group> groups_of_scalars() const {
    return scalar_groups.empty() ? std::vector<Group>{group} : scalar_groups;
  }
  // The local optimizer's step. If it throws, the others do not wait for this rank's values in vain.
  void step_local();
  // UsageError unless the whole optimizer's groups have the parameters that it was made for, and it has no state.
  void require_known(const torch::optim::Optimizer& whole) const;
  // take_gradients(), unscaled and checked. Collective with a scaler.
  std::vector<at::Tensor> unscaled_gradients(const GradScaler* scaler);
  // Clips them; returns the norm before. Collective.
  double clip(const std::vector<at::Tensor>& gradients, double max_norm, double norm_type = 2) const;
  int64_t count_zeros() const;
  // Values are about to change, which the other ranks may read until they enter their own step. What the step has asked
  // all ranks already has been such a meeting. Collective.
  void await_readers() const;

  // Whether shards have second owners.
  bool has_second_owners() const { return second_owners.has_value(); }
  // Whether they would, in an elastic job.
  virtual bool apart() const { return group.size() > 1 && !shared(); }
  // From now on this rank is the second owner of what choose_second_owners() says. Returns all of its part of the
  // groups, whose values are the caller's to fill in. disable_second_owners(): no longer; returns what the optimizer
  // updates for others.
  virtual ParamGroups enable_second_owners(const ParamGroups& groups) = 0;
  virtual std::vector<at::Tensor> disable_second_owners() = 0;
  // This rank's part of the groups, as they have been divided.
  virtual ParamGroups own_part(const ParamGroups& groups) = 0;
  // What this rank owns, and its state.
  virtual std::vector<ShardSource::Shard> shards() const = 0;
  // Names of parameters that are the same on all ranks.
  using ShardNames = std::unordered_map<const c10::TensorImpl*, std::string>;
  virtual ShardNames shard_names() const = 0;
  // What this rank owns has its values, which its parameters must have, too.
  virtual void take_filled() {}
  // Whether the program has written parameters since the last update; adopt_alone() adopts that without the other
  // ranks, whose programs have made the same changes.
  virtual bool is_written() const = 0;
  virtual void adopt_alone() = 0;
  // What second owners have of gradients is as the first owners have it. DisagreeError if they have other values.
  // Collective.
  virtual void check_second_owners() = 0;
  // Of the optimizer's state.
  void add_own_state(SecondOwnerCheck& check) const;
  // What an update has left for the other ranks comes to them. Collective. end_outdated(): nor will it, as their shards
  // are replaced.
  virtual void publish_deferred_update() = 0;
  virtual void end_outdated() = 0;
  // Gradients must not change any more, which require_sealed() checks: UsageError.
  virtual void seal_gradients() = 0;
  virtual void require_sealed() const = 0;
  // What all ranks own, where they share memory: each of them can give all.
  ShardSource source_of_all_shards(const ParamGroups& groups);
  // All ranks have come to the division with second owners that this one has made, or learn that they had.
  void seal_division(int64_t division);
  // Whether steps have a commit.
  bool has_commit() const { return guarded || commit.lone || has_second_owners(); }
  // Of a rank without a guard.
  void step_alone(bool updates);
  // The local optimizer's, of what it has gradients for.
  virtual void step_owned() { local->step(); }
  // Whether other hosts have the same commit.
  bool has_replicas() const { return everybody && everybody->size() > group.size(); }

  GradScaler* own_scaler() { return scaler ? &*scaler : nullptr; }

  OptimizerState gather(const std::vector<StatePiece>& pieces, std::optional<int> recipient) const;
  void load(const std::vector<StatePiece>& pieces, const OptimizerState& state,
            StateDtypes dtypes = StateDtypes::of_parameters);
};

}  // namespace shoal
