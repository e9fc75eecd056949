// Sharded optimizers in elastic jobs: guarded steps, and the shares of ranks that have ended divided among those that
// are left.

#include <fmt/format.h>
#include <torch/utils.h>

#include <algorithm>
#include <utility>

#include "engine/changes/operator_watch.h"
#include "engine/sharded/changed_options.h"
#include "engine/sharded/sharded_ranges.h"
#include "engine/wrapper/logging.h"
#include "memory/views.h"
#include "shoal/error.h"
#include "shoal/telemetry.h"

namespace shoal {

void ShardedOptimizerBase::guard() {
  auto& state = *state_;
  state.commit.lone = state.group.size() == 1 && state.has_replicas();
  if (state.group.size() == 1 || state.guarded || state.second_owners) return;  // one that has come has either since
  const torch::NoGradGuard no_grad;
  if (state.apart()) return enable_second_owners();
  state.guarded = std::make_unique<GuardedUpdate>(state.group, state.shared_targets(param_groups_), *state.local,
                                                  state.element_wise);
  state.guarded->seal();
}

void ShardedOptimizerBase::unguard() {
  state_->guarded.reset();
  state_->commit.lone = false;
  if (state_->second_owners) disable_second_owners();
}

void ShardedOptimizerBase::compute_shares(bool now) {
  state_->commit.computes_shares = now;
}

bool ShardedOptimizerBase::prepare_commit() {
  auto& state = *state_;
  if (!state.has_commit()) return false;
  state.commit.passed = state.commit.refused = false;
  state.agreement.loaded.reset();  // newcomers have other options and states before; they get the job's
  const torch::NoGradGuard no_grad;
  state.require_known(*this);
  state.begin_step();
  adopt_changes();
  state.commit.mixed_in.clear();
  complete_gradients();
  if (state.has_second_owners()) state.commit.options = digest_of(param_groups_);
  state.commit.prepared = prepare_update(state.own_scaler(), state.clip_grad);
  state.seal_gradients();
  return state.guarded && state.guarded->prepare(state.commit.mixed_in);
}

Group ShardedOptimizerBase::job() const {
  return state_->everybody.value_or(state_->group);
}

bool ShardedOptimizerBase::update_was_refused() const {
  return state_->commit.refused && (!state_->guarded || state_->guarded->is_abandoned_by_all());
}

bool ShardedOptimizerBase::misses_update() const {
  const auto& guarded = state_->guarded;
  if (state_->has_second_owners()) state_->commit.passed = false;
  return guarded && !guarded->is_updated() && !guarded->is_abandoned_by_all();
}

std::optional<int64_t> ShardedOptimizerBase::updates_to_compare() const {
  return state_->has_second_owners() ? std::optional(state_->steps) : std::nullopt;
}

bool ShardedOptimizerBase::has_replicas() const {
  return state_->has_replicas();
}

bool ShardedOptimizerBase::has_second_owners() const {
  return state_->has_second_owners();
}

void ShardedOptimizerBase::allow_update() {
  state_->commit.passed = true;
}

void ShardedOptimizerBase::publish_update() {
  state_->publish_deferred_update();
}

void ShardedOptimizerBase::map_on_host(bool map) {
  auto& state = *state_;
  if (!state.guarded) return;
  if (state.group.all_reduce(map ? 1 : 0, ReduceOp::max, state.label("memory of gradients")) != 0)
    state.guarded->map_all();
}

bool ShardedOptimizerBase::commit_over_hosts(bool came, const DecideOverHosts& decide) {
  auto& state = *state_;
  if (state.guarded) return state.guarded->commit_over_hosts(came, decide);
  state.commit.passed = decide(came);
  return state.commit.passed;
}

void ShardedOptimizerBase::commit(bool map) {
  auto& state = *state_;
  if (!state.guarded) return;
  if (map) state.guarded->map_all();
  state.guarded->commit();
}

// After the commit, on whose gradients all ranks have agreed.
StepResult ShardedOptimizerBase::committed_step(GradScaler* scaler, double max_norm) {
  auto& state = *state_;
  if (state.guarded) {
    state.guarded->require_commit();
  } else if (!std::exchange(state.commit.passed, false)) {
    GuardedUpdate::refuse_without_commit();
  }
  state.commit.refused = true;  // if it is left before the update
  if (scaler != state.own_scaler() || max_norm != state.clip_grad) {
    throw UsageError(state.name +
                     ": a loss scaler and clipping communicate, which an update in an elastic job must not: clip with "
                     "clip_grad_norm() in the first function of Elastic::step()");
  }
  const torch::NoGradGuard no_grad;
  if (!state.has_second_owners())
    state.begin_step();  // it waits for readers of pages, and prepare_commit() has done so
  adopt_changes();
  state.take_gradients();  // shows what has been dropped or zeroed since
  state.require_sealed();
  const auto result = *state.commit.prepared;
  const bool updates = result.updated || moves_without_update();
  if (updates && state.guarded) state.guarded->require_committed_gradients();
  state.commit.refused = false;
  if (updates) {
    copy_options(param_groups_, state.local->param_groups());
    const UnwatchedOperators own;
    const TimedScope scope(timeline_of(state.group), "update", state.steps);
    const auto run = [&] { state.guarded ? state.guarded->run(result.updated) : state.step_alone(result.updated); };
    state.time("optimizer-inner-step", 2, run, nullptr);
  } else if (state.guarded) {
    state.guarded->skip();
  }
  if (!state.guarded) state.publish();  // within this rank
  show_update();
  if (scaler != nullptr) scaler->update(!result.updated);
  state.end_step(scaler != nullptr);
  if (state.second_owners) {
    state.second_owners->updated = state.shards();
    state.second_owners->before.reset();
  }
  state.finite.reset();
  ++state.steps;
  return result;
}

void ShardedOptimizerBase::State::step_alone(bool updates) {
  for (const auto& group : local->param_groups()) {
    for (const auto& values : group.params()) {
      const auto found = commit.mixed_in.find(values.unsafeGetTensorImpl());
      if (found != commit.mixed_in.end()) GossipTerm::mix(values, found->second.others, found->second.own);
    }
  }
  if (updates) step_owned();
}

const HeldState& ShardedOptimizerBase::State::held(const ParamGroups& groups) {
  if (guarded) return guarded->held();
  if (!alone) alone = std::make_unique<LoneState>(shared_targets(groups), local);
  return *alone;
}

void ShardedOptimizerBase::take_over(int64_t step) {
  auto& state = *state_;
  if (state.group.size() > 1 && !state.shared()) {
    throw UsageError(
        fmt::format("Elastic: {} outlives its ranks only where they share its parameters: on the CPU of one host, over "
                    "the transport host",
                    state.name));
  }
  const auto targets = state.shared_targets(param_groups_);
  state.local->state().clear();  // some make it in their constructor
  state.steps = step;
  // The former ones count, and their memory is only read, until all ranks have taken over what they own now.
  const auto& former = state.held(param_groups_);
  if (state.group.size() == 1) {
    GuardedUpdate::release(former, targets.front(), *state.local);
    state.guarded.reset();
    state.commit.lone = state.has_replicas();
  } else {
    auto made = std::make_unique<GuardedUpdate>(state.group, targets, *state.local, state.element_wise);
    made->adopt(former);
    made->seal();
    state.guarded = std::move(made);
    state.commit.lone = false;
  }
  state.alone.reset();
}

std::vector<std::string> ShardedOptimizerBase::description() const {
  const auto& state = *state_;
  return {fmt::format("clip_grad: {}", state.clip_grad),
          fmt::format("log_num_zeros_in_grad: {}", state.log_num_zeros_in_grad),
          fmt::format("the optimizer's loss scaler: {}", in_words(state.scaler ? &*state.scaler : nullptr))};
}

GradScaler* ShardedOptimizerBase::own_scaler() const {
  return state_->own_scaler();
}

void ShardedOptimizerBase::visit_state(
    const torch::nn::Module& module,
    const std::function<void(const std::string& name, const NamedState& state)>& visit) {
  const torch::NoGradGuard no_grad;
  auto& state = *state_;
  const auto& held = state.held(param_groups_);
  std::string last;
  for (const auto& piece : state.pieces(module)) {
    if (std::exchange(last, piece.name) == piece.name) continue;
    UpdateTarget whole{.values = piece.parameter, .parameter = piece.parameter, .range = {0, piece.parameter.numel()}};
    auto named = held.state_of(whole).value_or(NamedState());
    if (held.has_copies_of(piece.parameter)) {
      whole.values = at::empty_strided(piece.parameter.sizes(), dense_strides(piece.parameter), at::kFloat);
      held.copy_values(whole);
      named.tensors[main_param] = whole.values;
    }
    visit(piece.name, named);
  }
  if (state.scaler) visit(grad_scaler_key, scaler_state(*state.scaler));
}

void ShardedOptimizerBase::take_state(const torch::nn::Module& module, const OptimizerState& whole) {
  state_->load(state_->pieces(module), whole, StateDtypes::kept);
}

UpdateTargets ShardedOptimizerCore::State::shared_targets(const ParamGroups& groups) {
  std::unordered_map<const c10::TensorImpl*, size_t> numbers;
  for (size_t number = 0; number < groups.size(); ++number) {
    for (const auto& parameter : groups[number].params()) numbers[parameter.unsafeGetTensorImpl()] = number;
  }
  UpdateTargets targets(static_cast<size_t>(group.size()));
  for (const auto& module : modules) {
    module->wait_all();
    module->share_copies();
    for (int rank = 0; rank < group.size(); ++rank) {
      for (auto& target : module->targets(rank)) {
        target.param_group = numbers.at(target.parameter.unsafeGetTensorImpl());
        targets[static_cast<size_t>(rank)].push_back(std::move(target));
      }
    }
  }
  return targets;
}

bool ShardedOptimizerCore::has_buffered_gradient(const at::Tensor& parameter) const {
  for (const auto& module : state().modules) {
    const auto& gradients = module->reducer().gradients();
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (gradients[i].parameter.is_same(parameter))
        return module->reducer().sums().remains(i) == EarlierSums::Remains::values;
    }
  }
  return false;
}

void ShardedOptimizerCore::require_regroupable() const {
  const auto& modules = state().modules;
  const bool shared = state().group.size() == 1 ||
                      std::all_of(modules.begin(), modules.end(), [](const auto& module) { return module->shared(); });
  const auto label = state().label("whether parameters are shared");
  if (job().all_reduce(shared ? 1 : 0, ReduceOp::min, label) == 1) return;
  throw UsageError(
      fmt::format("Elastic: {} outlives its ranks only where they share its parameters: on the CPU of one host, over "
                  "the transport auto or host (of all hosts); on several shard within each: hybrid_shard of "
                  "FullyShardedDataParallel, shard_within_host of DistributedOptimizer",
                  state().name));
}

void ShardedOptimizerCore::follow(const Group& group, const Group& job) {
  auto& state = this->state();
  state.group = group;
  if (state.everybody) state.everybody = job;
  if (!state.scalar_groups.empty()) state.scalar_groups = {group};
  state.collected.reset();
  state.finite.reset();
  state.commit.prepared.reset();
  connect_clipping();
}

void ShardedOptimizerCore::regroup(const Group& group, const Group& job,
                                   std::vector<std::shared_ptr<ShardedModule>> modules, int64_t step) {
  const torch::NoGradGuard no_grad;
  auto& state = this->state();
  if (state.second_owners) {
    state.modules = std::move(modules);
    follow(group, job);
    return take_over_from_owners(step);
  }
  const bool stays_alone = job.size() == 1 && !state.has_commit() && !state.alone;
  const auto* held = stays_alone ? nullptr : &state.held(param_groups_);
  const auto former = std::exchange(state.modules, std::move(modules));
  follow(group, job);
  if (stays_alone) {
    state.steps = step;
    for (size_t number = 0; number < former.size(); ++number) state.modules[number]->keep_pieces(*former[number]);
    return;
  }
  // Float32 copies come from the former ranges first, and then from what the program has written to the parameters
  // since.
  for (const auto& module : state.modules) {
    for (const auto& target : module->targets(group.rank())) {
      if (target.rounded.defined()) held->copy_values(target);
    }
  }
  state.for_pieces([](ShardedModule&, OwnedPiece& piece) { piece.take_back(); });
  state.local = make_local(state.make, state.shares_of(param_groups_), *defaults_, state.name);
  take_over(step);
}

}  // namespace shoal
