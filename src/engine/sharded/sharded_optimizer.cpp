// Gradients are checked and clipped; what each rank owns is updated and handed out.

#include "shoal/detail/sharded_optimizer.h"

#include <fmt/format.h>
#include <torch/utils.h>

#include <utility>

#include "checkpoint/on_all_ranks.h"
#include "comm/group/group_state.h"
#include "engine/changes/operator_watch.h"
#include "engine/gradients/gradient_norm.h"
#include "engine/gradients/local_gradients.h"
#include "engine/sharded/changed_options.h"
#include "engine/sharded/sharded_optimizer_state.h"
#include "shoal/error.h"
#include "shoal/telemetry.h"

namespace shoal {

void ShardedOptimizerBase::State::require_known(const torch::optim::Optimizer& whole) const {
  if (!whole.state().empty()) {
    throw UsageError(name +
                     ": state was written through torch::optim::Optimizer&, where step() does not see it; use "
                     "load_state_dict()");
  }
  const auto change = known.change(whole.param_groups());
  if (!change.empty()) throw UsageError(fmt::format("{}: {} {}", name, change, advice_on_groups()));
}

std::vector<at::Tensor> ShardedOptimizerBase::State::unscaled_gradients(const GradScaler* scaler) {
  agree_on_gradients();
  if (has_second_owners()) check_second_owners();
  auto gradients = take_gradients();
  if (finite) return gradients;
  finite = true;
  if (scaler == nullptr) return gradients;
  const auto unscale = [&] {
    // The optimizer's own scaler has unscaled what was clipped before.
    const int own = scaler != own_scaler() && scaler->unscaled(gradients) ? 2 : scaler->unscale(gradients) ? 1 : 0;
    const double scale = scaler->value();
    auto found = at::tensor({static_cast<double>(own), scale, -scale}, at::kDouble);
    for (const auto& scalars : groups_of_scalars()) {
      scalars.all_reduce(found, ReduceOp::max, label("inf or NaN in gradients")).wait();
    }
    const auto* most = found.const_data_ptr<double>();
    if (most[1] != -most[2]) {
      finite.reset();
      throw DisagreeError(fmt::format(
          "{}: ranks have loss scales from {} to {}, and this one has {}: make the scaler alike on every rank", name,
          -most[2], most[1], scale));
    }
    if (most[0] == 2) {
      finite.reset();
      throw UsageError(
          name +
          ": the gradients have been unscaled already, by GradScaler::unscale(), and a step with the scaler does "
          "that itself, and clips: call step(scaler, max_norm) without unscale() and clip_grad_norm()");
    }
    finite = most[0] == 0;
  };
  time("optimizer-unscale-and-check-inf", 2, unscale, &group);
  agreement.met = true;
  return gradients;
}

double ShardedOptimizerBase::State::clip(const std::vector<at::Tensor>& gradients, double max_norm,
                                         double norm_type) const {
  if (commit.computes_shares) refuse_to_clip_shares();
  const auto norm = global_norm(counted_gradients(), norm_type, groups_of_scalars(), label("norm of the gradients"));
  clip_to_norm(gradients, norm, max_norm);
  return norm;
}

int64_t ShardedOptimizerBase::State::count_zeros() const {
  auto zeros = at::zeros({1}, at::kLong);
  for (const auto& gradient : counted_gradients()) zeros += gradient.numel() - gradient.count_nonzero();
  for (const auto& scalars : groups_of_scalars()) {
    scalars.all_reduce(zeros, ReduceOp::sum, label("zeros in gradients")).wait();
  }
  return zeros.item<int64_t>();
}

void ShardedOptimizerBase::State::await_readers() const {
  if (shared() && !agreement.met) group.barrier(label("before the update")).wait();
}

OptimizerState ShardedOptimizerBase::State::gather(const std::vector<StatePiece>& pieces,
                                                   std::optional<int> recipient) const {
  auto state = gather_state(group, pieces, *local, recipient);
  if (scaler && (!recipient || *recipient == group.rank())) state[grad_scaler_key] = scaler_state(*scaler);
  return state;
}

void ShardedOptimizerBase::State::load(const std::vector<StatePiece>& pieces, const OptimizerState& state,
                                       StateDtypes dtypes) {
  if (element_wise) require_shapes(pieces, state);
  load_state(group.rank(), pieces, *local, state, dtypes, scaler ? &*scaler : nullptr);
}

ShardedOptimizerBase::ShardedOptimizerBase(const ParamGroups& groups,
                                           std::unique_ptr<torch::optim::OptimizerOptions> defaults,
                                           OptimizerFactory make, std::unique_ptr<State> state)
    : torch::optim::Optimizer(groups, std::move(defaults)), state_(std::move(state)) {
  state_->make = std::move(make);
  share(groups, 0);
}

ShardedOptimizerBase::~ShardedOptimizerBase() = default;

void ShardedOptimizerBase::share(ParamGroups groups, size_t given) {
  auto& state = *state_;
  const auto all = state.everybody.value_or(state.group);
  std::unique_ptr<torch::optim::Optimizer> local;
  // Another rank's share may be refused where this one's is not.
  on_all_ranks(all, "param groups",
               [&] { local = make_local(state.make, state.shares_of(groups), *defaults_, state.name); });
  for (size_t number = given; number < groups.size(); ++number) {
    groups[number].set_options(local->param_groups()[number].options().clone());
  }
  agree(all, "the parameters and options of " + state.name, describe(groups));
  for (size_t number = given; number < groups.size(); ++number) {
    if (number < param_groups_.size()) {
      param_groups_[number].set_options(groups[number].options().clone());
    } else {
      param_groups_.push_back(std::move(groups[number]));
    }
  }
  state.take_shares(std::move(local));
  state.known = KnownParameters(param_groups_);
}

void ShardedOptimizerBase::adopt_changes() {
  if (state_->must_share_again(param_groups_)) {
    share(param_groups_, param_groups_.size());
  } else {
    state_->adopt_values();
  }
}

void ShardedOptimizerBase::agree_on_changes() {
  auto& state = *state_;
  const auto loaded = std::exchange(state.agreement.loaded, std::nullopt);
  const auto all = state.everybody.value_or(state.group);
  if (all.size() == 1) return;
  const auto changed = changed_options(state.local->param_groups(), param_groups_);
  if (!changed.empty()) agree_on_options(all, state.name, changed);
  if (loaded) agree_on_loaded_state(all, state.name, *loaded);
  state.agreement.met = state.agreement.met || loaded || !changed.empty();
}

// Runs the local optimizer's step. If it throws, this rank hands out nothing, and the others must not wait for that. An
// error of shoal is a refusal that has changed nothing: a program that does the same on all ranks gets it on all, and
// may go on.
void ShardedOptimizerBase::State::step_local() {
  try {
    local->step();
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    const std::string text = error.what();
    const auto why =
        fmt::format("{}: its local optimizer has failed in step(): {}; parameters of other ranks may be updated", name,
                    text.substr(0, text.find('\n')));
    leave_group(group, why);
    if (everybody) leave_group(*everybody, why);
    throw;
  }
}

// This rank's values change, and all ranks get them.
void ShardedOptimizerBase::update(bool finite) {
  auto& state = *state_;
  state.await_readers();
  if (finite) {
    copy_options(param_groups_, state.local->param_groups());
    const UnwatchedOperators own;  // its writes are the parameters' updates
    const TimedScope scope(timeline_of(state.group), "update", state.steps);
    state.time(
        "optimizer-inner-step", 2, [&] { state.step_local(); }, &state.group);
  }
  const auto hand_out = [&] {
    end_gradients();
    state.publish();
  };
  if (state.wait_at_first_touch) {
    hand_out();
  } else {
    state.time("params-all-gather", 1, hand_out, &state.group);
  }
}

// The part of a step that reads and changes gradients.
StepResult ShardedOptimizerBase::prepare_update(GradScaler* scaler, double max_norm) {
  auto& state = *state_;
  StepResult result;
  {
    const auto gradients = state.unscaled_gradients(scaler);
    result.updated = *state.finite;
    if (result.updated && max_norm > 0) {
      state.time(
          "optimizer-clip-main-grad", 2, [&] { result.grad_norm = state.clip(gradients, max_norm); }, &state.group);
      state.agreement.met = true;
    }
  }
  if (result.updated && state.log_num_zeros_in_grad) {
    result.num_zeros = state.count_zeros();
    state.agreement.met = true;
  }
  return result;
}

StepResult ShardedOptimizerBase::update_if_finite(GradScaler* scaler, double max_norm) {
  auto& state = *state_;
  const torch::NoGradGuard no_grad;
  const auto result = prepare_update(scaler, max_norm);
  if (scaler != nullptr) scaler->update(!result.updated);
  if (result.updated || moves_without_update()) update(result.updated);
  state.end_step(scaler != nullptr);
  state.finite.reset();
  ++state.steps;
  return result;
}

StepResult ShardedOptimizerBase::step_with(GradScaler* scaler, double max_norm) {
  state_->require_known(*this);
  StepResult result;
  state_->agreement.met = false;
  const auto whole = [&] {
    if (state_->has_commit()) {
      result = committed_step(scaler, max_norm);
      return;
    }
    state_->begin_step();
    adopt_changes();
    agree_on_changes();
    complete_gradients();
    result = update_if_finite(scaler, max_norm);
  };
  state_->time("optimizer", 0, whole);
  return result;
}

StepResult ShardedOptimizerBase::step() {
  return step_with(state_->own_scaler(), state_->clip_grad);
}

at::Tensor ShardedOptimizerBase::step(LossClosure closure) {
  state_->require_known(*this);
  at::Tensor loss;
  if (closure != nullptr) {
    const at::AutoGradMode grad(true);
    loss = closure();
  }
  step();
  return loss;
}

void ShardedOptimizerBase::save(torch::serialize::OutputArchive&) const {
  refuse_archive(state_->name);
}

void ShardedOptimizerBase::load(torch::serialize::InputArchive&) {
  refuse_archive(state_->name);
}

void ShardedOptimizerBase::add_param_group(const torch::optim::OptimizerParamGroup& group) {
  add_parameters(group.params());
}

void ShardedOptimizerBase::add_parameters(const std::vector<at::Tensor>& parameters) {
  throw UsageError(fmt::format("{}: {}", state_->name, state_->advice_on_adding(parameters)));
}

const Group& ShardedOptimizerBase::group() const {
  return state_->group;
}

const torch::optim::Optimizer& ShardedOptimizerBase::local_optimizer() const {
  return *state_->local;
}

}  // namespace shoal
