#include "engine/sharded/sharded_ranges.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/utils.h>

#include <algorithm>
#include <functional>
#include <unordered_map>
#include <utility>

#include "engine/sharded/changed_options.h"
#include "shoal/error.h"

namespace shoal {
namespace {

using ClipNorm = std::function<double(double max_norm, double norm_type)>;

// clip_grad_norm_ of an optimizer with a scaler.
struct Clip {
  const void* optimizer;
  ClipNorm clip;
  ClipNorm former;  // of the one before, which counts again when this one has gone
  double operator()(double max_norm, double norm_type) const { return clip(max_norm, norm_type); }
};

}  // namespace

std::vector<StatePiece> ShardedOptimizerCore::State::state_pieces() const {
  std::vector<StatePiece> all;
  for (size_t number = 0; number < modules.size(); ++number) {
    for (auto& piece : modules[number]->state_pieces(modules.size() > 1 ? fmt::format("chunk{}.", number) : "")) {
      all.push_back(std::move(piece));
    }
  }
  return all;
}

// This rank's pieces in their parameters' groups.
ParamGroups ShardedOptimizerCore::State::shares_of(const ParamGroups& groups) {
  std::unordered_map<const c10::TensorImpl*, std::string> names;
  for (const auto& module : modules) {
    for (const auto& gradient : module->reducer().gradients()) {
      names.emplace(gradient.parameter.unsafeGetTensorImpl(), gradient.name);
    }
  }
  std::unordered_map<const c10::TensorImpl*, size_t> param_group;
  for (size_t number = 0; number < groups.size(); ++number) {
    for (const auto& parameter : groups[number].params()) {
      const auto found = names.find(parameter.unsafeGetTensorImpl());
      if (found == names.end()) {
        if (!parameter.requires_grad()) continue;
        throw UsageError(
            fmt::format("{}: a parameter [{}] of param group {} is not a sharded parameter of the module; use another "
                        "optimizer for it",
                        name, fmt::join(parameter.sizes(), ", "), number));
      }
      const auto [place, fresh] = param_group.emplace(found->first, number);
      if (fresh || place->second == number) continue;
      throw UsageError(fmt::format("{}: parameter {} [{}] is in two param groups; remove it from one", name,
                                   found->second, fmt::join(parameter.sizes(), ", ")));
    }
  }
  for (const auto& module : modules) {
    for (const auto& gradient : module->reducer().gradients()) {
      if (param_group.contains(gradient.parameter.unsafeGetTensorImpl())) continue;
      throw UsageError(
          fmt::format("{}: parameter {} belongs to no param group; add it to one, freeze it or ignore it. One "
                      "optimizer updates all parameters of a sharded module; MuonWithAdamW is Muon for "
                      "matrices and AdamW for the rest",
                      name, gradient.name));
    }
  }
  auto share = empty_like(groups);
  for_pieces([&](const ShardedModule& module, OwnedPiece& piece) {
    const auto& gradient = module.reducer().gradients()[piece.gradient];
    share[param_group.at(gradient.parameter.unsafeGetTensorImpl())].params().push_back(piece.main);
  });
  return share;
}

void ShardedOptimizerCore::State::adopt_values() {
  for (const auto& module : modules) module->require_kinds();
  for (const auto& module : modules) module->adopt_changes(label("replaced parameters"));
  if (!has_commit()) return;
  for (const auto& module : modules) {
    module->visit_gathers([](const std::string&, ParameterGather& gather) { gather.leave_moved(); });
  }
}

void ShardedOptimizerCore::State::begin_step() {
  if (modules.size() == 1) modules.front()->reducer().settle_failed_backward();  // several take turns
  for (const auto& module : modules) module->serve_readers();
}

void ShardedOptimizerCore::State::prepare_gradients() {
  for (const auto& module : modules) module->reducer().prepare_sums(name);
}

// In float32 and over; sets grad() of the main pieces.
std::vector<at::Tensor> ShardedOptimizerCore::State::take_gradients() {
  prepare_gradients();
  int64_t reductions = 0;
  for (const auto& module : modules) reductions += module->reducer().step();
  const bool again = collected == reductions;  // what has been clipped
  if (collected && !again) {
    for (const auto& module : modules) module->reducer().sums().require_addable();
  }
  if (!again) finite.reset();
  collected = reductions;
  std::vector<at::Tensor> list;
  for_pieces([&](const ShardedModule& module, OwnedPiece& piece) {
    auto& grad = piece.main.mutable_grad();
    if (!module.reducer().sums().has_part(piece.gradient)) {
      grad.reset();
      return;
    }
    if (!again || !grad.defined()) {
      grad = piece.sum.to(piece.main.scalar_type());
      piece.taken = piece.sum._version();
    } else if (piece.sum.count_nonzero().item<int64_t>() == 0 && grad.count_nonzero().item<int64_t>() != 0) {
      grad.zero_();  // zeroed since
    }
    if (has_commit() && !grad.is_alias_of(piece.sum) && piece.taken != piece.sum._version()) {
      throw UsageError(GuardedUpdate::late_change);
    }
    list.push_back(grad);
  });
  return list;
}

std::vector<at::Tensor> ShardedOptimizerCore::State::counted_gradients() const {
  std::vector<at::Tensor> list;
  for_pieces([&](const ShardedModule&, const OwnedPiece& piece) {
    if (piece.counted && piece.main.grad().defined()) list.push_back(piece.main.grad());
  });
  return list;
}

bool ShardedOptimizerCore::State::shared() const {
  return std::any_of(modules.begin(), modules.end(), [](const auto& module) { return module->shared(); });
}

void ShardedOptimizerCore::State::publish() {
  const auto updated = label("updated parameters");
  if (second_owners) {
    for (const auto& module : modules) module->publish_later(updated);
    return;
  }
  for (const auto& module : modules) module->publish(updated);
  for (const auto& module : modules) module->wait(updated, wait_at_first_touch);
}

void ShardedOptimizerCore::State::end_step(bool scaled) {
  for_pieces([](ShardedModule&, OwnedPiece& piece) { piece.main.mutable_grad().reset(); });
  for (const auto& module : modules) module->drop_former();
  collected.reset();
  if (!scaled) return;
  for (const auto& module : modules) {
    module->reducer().sums().spoil(
        "has been used by a step with a loss scale, which may have changed: drop it with zero_grad() before the next "
        "backward or step()");
  }
}

std::string ShardedOptimizerCore::State::advice_on_groups() const {
  return "after construction; construct a new optimizer with these groups, and transfer the state with state_dict() "
         "and "
         "load_state_dict()";
}

std::string ShardedOptimizerCore::State::advice_on_adding(const std::vector<at::Tensor>& parameters) const {
  std::vector<std::string> faults;
  for (const auto& parameter : parameters) {
    std::string found;
    for (const auto& module : modules) {
      for (const auto& gradient : module->reducer().gradients()) {
        if (gradient.parameter.is_same(parameter)) found = gradient.name;
      }
    }
    faults.push_back(found.empty() ? fmt::format("a parameter [{}] is not one of the sharded parameters",
                                                 fmt::join(parameter.sizes(), ", "))
                                   : fmt::format("parameter {} is already in a param group", found));
  }
  return fmt::format(
      "parameters cannot be added after construction, because shards are laid out there: {}; construct a new optimizer "
      "with all groups",
      fmt::join(faults, "; "));
}

ShardedOptimizerCore::ShardedOptimizerCore(ParamGroups groups, std::unique_ptr<torch::optim::OptimizerOptions> defaults,
                                           OptimizerFactory make, std::unique_ptr<State> state)
    : ShardedOptimizerBase(groups, std::move(defaults), std::move(make), std::move(state)) {
  connect_clipping();
}

void ShardedOptimizerCore::connect_clipping() {
  if (!state().scaler) return;
  for (const auto& module : state().modules) {
    module->clip_without_scale =
        Clip{this, [this](double max_norm, double norm_type) { return clip_grad_norm(max_norm, norm_type); },
             std::move(module->clip_without_scale)};
  }
}

// Another optimizer may have been made since, over the same module.
ShardedOptimizerCore::~ShardedOptimizerCore() {
  for (const auto& module : state().modules) {
    auto* link = &module->clip_without_scale;
    while (*link && link->target<Clip>()->optimizer != this) link = &link->target<Clip>()->former;
    if (*link) *link = ClipNorm(std::move(link->target<Clip>()->former));
  }
}

ShardedOptimizerCore::State& ShardedOptimizerCore::state() const {
  return static_cast<State&>(ShardedOptimizerBase::state());
}

// Between backward and step, of gradients without the loss's scale.
double ShardedOptimizerCore::clip_grad_norm(double max_norm, double norm_type) {
  const torch::NoGradGuard no_grad;
  const auto norm = state().clip(state().unscaled_gradients(scaler()), max_norm, norm_type);
  for (const auto& module : state().modules) {
    module->reducer().sums().spoil(
        "has been clipped and has no loss scale any more, so that no other can be added to it: call step(), or drop it "
        "with zero_grad(), before the next backward",
        /*add_only=*/true);
  }
  return norm;
}

at::Tensor ShardedOptimizerCore::scale_loss(const at::Tensor& loss) const {
  return scaler() != nullptr ? scaler()->scale(loss) : loss;
}

const GradScaler* ShardedOptimizerCore::scaler() const {
  return state().scaler ? &*state().scaler : nullptr;
}

OptimizerState ShardedOptimizerCore::state_dict(std::optional<int> recipient) const {
  state().require_known(*this);
  for (const auto& module : state().modules) module->require_kinds();
  for (const auto& module : state().modules) module->agree_on_changes(state().label("replaced parameters"));
  return state().gather(state().state_pieces(), recipient);
}

void ShardedOptimizerCore::load_state_dict(const OptimizerState& state) {
  this->state().require_known(*this);
  this->state().load(this->state().state_pieces(), state);
  for (const auto& module : this->state().modules) module->drop_former();
  this->state().agreement.loaded = digest_of(state);
}

}  // namespace shoal
