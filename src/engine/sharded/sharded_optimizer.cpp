// Gradients are checked and clipped; each rank's pieces are updated and handed out.

#include "shoal/detail/sharded_optimizer.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/utils.h>

#include <algorithm>
#include <unordered_map>

#include "checkpoint/on_all_ranks.h"
#include "engine/gradients/gradient_norm.h"
#include "engine/paging/operator_watch.h"
#include "engine/sharded/sharded_optimizer_state.h"
#include "optim/param_groups.h"
#include "shoal/error.h"
#include "shoal/group.h"

namespace shoal {

std::vector<StatePiece> ShardedOptimizerCore::State::state_pieces() const {
  std::vector<StatePiece> all;
  for (size_t number = 0; number < modules.size(); ++number) {
    for (auto& piece : modules[number]->state_pieces(modules.size() > 1 ? fmt::format("chunk{}.", number) : "")) {
      all.push_back(std::move(piece));
    }
  }
  return all;
}

std::vector<at::Tensor> ShardedOptimizerCore::State::counted_gradients() const {
  std::vector<at::Tensor> list;
  for_pieces([&](const ShardedModule&, const OwnedPiece& piece) {
    if (piece.counted && piece.main.grad().defined()) list.push_back(piece.main.grad());
  });
  return list;
}

void ShardedOptimizerCore::State::await_readers() const {
  const bool shared = std::any_of(modules.begin(), modules.end(), [](const auto& module) { return module->shared(); });
  if (shared && !met) group.barrier(label("before the update")).wait();
}

void ShardedOptimizerCore::State::require_known(const ParamGroups& groups) const {
  const auto change = known.change(groups);
  if (change.empty()) return;
  throw UsageError(
      fmt::format("{}: {} after construction; construct a new optimizer with these groups, and transfer the state with "
                  "state_dict() and load_state_dict()",
                  name, change));
}

// This rank's pieces in their parameters' groups.
ShardedOptimizerCore::ParamGroups ShardedOptimizerCore::shares_of(const ParamGroups& groups) const {
  std::unordered_map<const c10::TensorImpl*, std::string> names;
  for (const auto& module : state_->modules) {
    for (const auto& gradient : module->reducer().gradients()) {
      names.emplace(gradient.parameter.unsafeGetTensorImpl(), gradient.name);
    }
  }
  std::unordered_map<const c10::TensorImpl*, size_t> param_group;
  for (size_t number = 0; number < groups.size(); ++number) {
    for (const auto& parameter : groups[number].params()) {
      const auto name = names.find(parameter.unsafeGetTensorImpl());
      if (name == names.end()) {
        if (!parameter.requires_grad()) continue;
        throw UsageError(
            fmt::format("{}: a parameter [{}] of param group {} is not a sharded parameter of the module; use another "
                        "optimizer for it",
                        state_->name, fmt::join(parameter.sizes(), ", "), number));
      }
      const auto [place, fresh] = param_group.emplace(name->first, number);
      if (fresh || place->second == number) continue;
      throw UsageError(fmt::format("{}: parameter {} [{}] is in two param groups; remove it from one", state_->name,
                                   name->second, fmt::join(parameter.sizes(), ", ")));
    }
  }
  for (const auto& module : state_->modules) {
    for (const auto& gradient : module->reducer().gradients()) {
      if (param_group.contains(gradient.parameter.unsafeGetTensorImpl())) continue;
      throw UsageError(fmt::format("{}: parameter {} belongs to no param group; add it to one, freeze it or ignore it",
                                   state_->name, gradient.name));
    }
  }
  auto share = empty_like(groups);
  state_->for_pieces([&](const ShardedModule& module, OwnedPiece& piece) {
    const auto& gradient = module.reducer().gradients()[piece.gradient];
    share[param_group.at(gradient.parameter.unsafeGetTensorImpl())].params().push_back(piece.main);
  });
  return share;
}

ShardedOptimizerCore::ShardedOptimizerCore(ParamGroups groups, std::unique_ptr<torch::optim::OptimizerOptions> defaults,
                                           const Factory& make, std::unique_ptr<State> state)
    : torch::optim::Optimizer(groups, std::move(defaults)), state_(std::move(state)) {
  // Another rank's pieces may be refused where this one's are not.
  const auto all = state_->everybody.value_or(state_->group);
  on_all_ranks(all, "param groups",
               [&] { state_->local = make_local(make, shares_of(groups), *defaults_, state_->name); });
  copy_options(state_->local->param_groups(), param_groups_);
  agree(all, "the parameters and options of " + state_->name, describe(param_groups_));
  state_->known = KnownParameters(param_groups_);
  if (!state_->scaler) return;
  for (const auto& module : state_->modules) {
    module->clip_without_scale = [this](double max_norm, double norm_type) {
      return clip_grad_norm(max_norm, norm_type);
    };
  }
}

ShardedOptimizerCore::~ShardedOptimizerCore() {
  for (const auto& module : state_->modules) module->clip_without_scale = {};
}

at::Tensor ShardedOptimizerCore::scale_loss(const at::Tensor& loss) const {
  return state_->scaler ? state_->scaler->scale(loss) : loss;
}

bool ShardedOptimizerCore::anywhere(bool here, const char* what) const {
  auto flag = at::full({1}, here ? 1 : 0, at::kInt);
  for (const auto& group : state_->groups_of_scalars())
    group.all_reduce(flag, ReduceOp::max, state_->label(what)).wait();
  return flag.item<int>() != 0;
}

void ShardedOptimizerCore::prepare_gradients() {
  for (const auto& module : state_->modules) module->reducer().prepare_sums(state_->name);
}

// What the optimizer will see, in float32 and over, without the loss's scale; sets grad() of the main pieces.
void ShardedOptimizerCore::collect_gradients() {
  auto& state = *state_;
  prepare_gradients();
  int64_t reductions = 0;
  for (const auto& module : state.modules) reductions += module->reducer().step();
  const bool again = state.collected == reductions;  // what has been clipped
  if (state.collected && !again) {
    for (const auto& module : state.modules) module->reducer().require_addable_sums();
  }
  state.collected = reductions;
  state.seen.clear();
  state.for_pieces([&](const ShardedModule& module, OwnedPiece& piece) {
    auto& grad = piece.main.mutable_grad();
    if (!module.reducer().has_sum(piece.gradient)) {
      grad.reset();
      return;
    }
    if (!again || !grad.defined()) {
      grad = piece.sum.to(piece.main.scalar_type());
    } else if (piece.sum.count_nonzero().item<int64_t>() == 0) {
      grad.zero_();  // zeroed since
    }
    state.seen.push_back(grad);
  });
  if (again) return;
  state.finite = true;
  if (!state.scaler) return;
  const auto unscale = [&] { state.finite = !anywhere(state.scaler->unscale(state.seen), "inf or NaN in gradients"); };
  state.time("optimizer-unscale-and-check-inf", 2, unscale, &state.group);
  state.met = true;
}

// Between backward and step, of gradients without the loss's scale.
double ShardedOptimizerCore::clip_grad_norm(double max_norm, double norm_type) {
  auto& state = *state_;
  const torch::NoGradGuard no_grad;
  collect_gradients();
  const auto norm = global_norm(state.counted_gradients(), norm_type, state.groups_of_scalars(),
                                state.label("norm of the gradients"));
  clip_to_norm(state.seen, norm, max_norm);
  for (const auto& module : state.modules) {
    module->reducer().spoil_sums(
        "has been clipped and has no loss scale any more, so that no other can be added to it: call step(), or drop it "
        "with zero_grad(), before the next backward",
        /*add_only=*/true);
  }
  return norm;
}

void ShardedOptimizerCore::publish() {
  auto& state = *state_;
  const auto updated = state.label("updated parameters");
  for (auto& module : state.modules) module->publish(updated);
  for (auto& module : state.modules) module->wait(updated, state.wait_at_first_touch);
}

// This rank's pieces get new values, and all ranks get them.
void ShardedOptimizerCore::update(bool finite) {
  auto& state = *state_;
  state.await_readers();
  if (finite) {
    copy_options(param_groups_, state.local->param_groups());
    const UnwatchedOperators own;  // its writes are the parameters' updates
    state.time(
        "optimizer-inner-step", 2, [&] { state.local->step(); }, &state.group);
  }
  const auto hand_out = [&] {
    end_gradients();
    publish();
  };
  if (state.wait_at_first_touch) {
    hand_out();
  } else {
    state.time("params-all-gather", 1, hand_out, &state.group);
  }
}

ShardedStep ShardedOptimizerCore::update_if_finite() {
  auto& state = *state_;
  const torch::NoGradGuard no_grad;
  ShardedStep result;
  collect_gradients();
  const auto& seen = state.seen;
  result.updated = state.finite;
  if (state.scaler) state.scaler->update(!result.updated);
  if (result.updated && state.clip_grad > 0) {
    const auto clip = [&] {
      result.grad_norm =
          global_norm(state.counted_gradients(), 2, state.groups_of_scalars(), state.label("norm of the gradients"));
      clip_to_norm(seen, *result.grad_norm, state.clip_grad);
    };
    state.time("optimizer-clip-main-grad", 2, clip, &state.group);
    state.met = true;
  }
  if (result.updated && state.log_num_zeros_in_grad) {
    auto zeros = at::zeros({1}, at::kLong);
    for (const auto& gradient : state.counted_gradients()) zeros += gradient.numel() - gradient.count_nonzero();
    for (const auto& group : state.groups_of_scalars()) {
      group.all_reduce(zeros, ReduceOp::sum, state.label("zeros in gradients")).wait();
    }
    result.num_zeros = zeros.item<int64_t>();
    state.met = true;
  }
  if (result.updated || moves_without_update()) update(result.updated);
  state.for_pieces([](ShardedModule&, OwnedPiece& piece) { piece.main.mutable_grad().reset(); });
  state.collected.reset();
  state.seen.clear();
  ++state.steps;
  if (!state.scaler) return result;
  for (const auto& module : state.modules) {
    module->reducer().spoil_sums(
        "has been used by a step with a loss scale, which may have changed: drop it with zero_grad() before the next "
        "backward or step()");
  }
  return result;
}

ShardedStep ShardedOptimizerCore::step() {
  state_->require_known(param_groups_);
  ShardedStep result;
  state_->met = false;
  const auto whole = [&] {
    for (const auto& module : state_->modules) module->serve_readers();
    adopt_changes();
    complete_gradients();
    result = update_if_finite();
  };
  state_->time("optimizer", 0, whole);
  return result;
}

at::Tensor ShardedOptimizerCore::step(LossClosure closure) {
  at::Tensor loss;
  if (closure != nullptr) {
    const at::AutoGradMode grad(true);
    loss = closure();
  }
  step();
  return loss;
}

void ShardedOptimizerCore::adopt_changes() const {
  for (const auto& module : state_->modules) module->require_kinds();
  for (const auto& module : state_->modules) module->adopt_changes(state_->label("replaced parameters"));
}

OptimizerState ShardedOptimizerCore::state_dict(std::optional<int> recipient) const {
  state_->require_known(param_groups_);
  adopt_changes();
  auto state = gather_state(state_->group, state_->state_pieces(), *state_->local, recipient);
  if (state_->scaler && (!recipient || *recipient == group().rank())) {
    state[grad_scaler_key] = scaler_state(*state_->scaler);
  }
  return state;
}

void ShardedOptimizerCore::load_state_dict(const OptimizerState& state) {
  state_->require_known(param_groups_);
  load_state(state_->group.rank(), state_->state_pieces(), *state_->local, state,
             state_->scaler ? &*state_->scaler : nullptr);
}

void ShardedOptimizerCore::save(torch::serialize::OutputArchive&) const {
  refuse_archive(state_->name);
}

void ShardedOptimizerCore::load(torch::serialize::InputArchive&) {
  refuse_archive(state_->name);
}

void ShardedOptimizerCore::add_param_group(const torch::optim::OptimizerParamGroup& group) {
  add_parameters(group.params());
}

void ShardedOptimizerCore::add_parameters(const std::vector<at::Tensor>& parameters) {
  std::vector<std::string> faults;
  for (const auto& parameter : parameters) {
    std::string found;
    for (const auto& module : state_->modules) {
      for (const auto& gradient : module->reducer().gradients()) {
        if (gradient.parameter.is_same(parameter)) found = gradient.name;
      }
    }
    faults.push_back(found.empty() ? fmt::format("a parameter [{}] is not one of the sharded parameters",
                                                 fmt::join(parameter.sizes(), ", "))
                                   : fmt::format("parameter {} is already in a param group", found));
  }
  throw UsageError(
      fmt::format("{}: parameters cannot be added after construction, because shards are laid out there: {}; construct "
                  "a new optimizer with all groups",
                  state_->name, fmt::join(faults, "; ")));
}

const GradScaler* ShardedOptimizerCore::scaler() const {
  return state_->scaler ? &*state_->scaler : nullptr;
}

const Group& ShardedOptimizerCore::group() const {
  return state_->group;
}

const torch::optim::Optimizer& ShardedOptimizerCore::local_optimizer() const {
  return *state_->local;
}

}  // namespace shoal
