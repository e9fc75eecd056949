#include "shoal/zero.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/utils.h>

#include <algorithm>

#include "checkpoint/on_all_ranks.h"
#include "engine/gradients/gradient_norm.h"
#include "engine/gradients/local_gradients.h"
#include "engine/paging/operator_watch.h"
#include "engine/sharded/changed_values.h"
#include "module/walk.h"
#include "optim/param_groups.h"
#include "shoal/deferred_init.h"
#include "shoal/error.h"
#include "shoal/group.h"
#include "strategy/zero/oss_state.h"

namespace shoal {

using torch::optim::OptimizerParamGroup;

void OSSOptions::validate() const {
  if (broadcast_buffer_size == 0 || broadcast_buffer_size < -1) {
    throw UsageError(fmt::format("OSS: broadcast_buffer_size {}: give elements, or -1 for a rank's whole share",
                                 broadcast_buffer_size));
  }
}

void OSSCore::State::require_known(const torch::optim::Optimizer& whole) const {
  if (!whole.state().empty()) {
    throw UsageError(
        "OSS: state was written through torch::optim::Optimizer&, where step() does not see it; use load_state_dict()");
  }
  const auto change = known.change(whole.param_groups());
  if (change.empty()) return;
  throw UsageError(
      fmt::format("OSS: {} through torch::optim::Optimizer&, which the other ranks do not see; undo it "
                  "(param_groups().pop_back()) and call OSS's own add_param_group() on every rank",
                  change));
}

OSSShares OSSCore::State::share(const ParamGroups& groups) const {
  OSSShares made;
  std::unordered_map<const c10::TensorImpl*, size_t> seen;
  size_t index = 0;
  for (size_t number = 0; number < groups.size(); ++number) {
    for (const auto& parameter : groups[number].params()) {
      const auto here = index++;
      const auto [before, first] = seen.emplace(parameter.unsafeGetTensorImpl(), number);
      if (!first) {
        // libtorch's parameters() lists a tied one once per name.
        if (before->second == number) continue;
        throw UsageError(fmt::format("OSS: parameter {} [{}] is in param groups {} and {}; remove it from one", here,
                                     fmt::join(parameter.sizes(), ", "), before->second, number));
      }
      if (!parameter.is_leaf()) {
        throw UsageError(
            fmt::format("OSS: parameter {} [{}] is not a leaf tensor, but the result of an operator; detach it", here,
                        fmt::join(parameter.sizes(), ", ")));
      }
      const auto owned = shares.places.find(parameter.unsafeGetTensorImpl());
      if (!parameter.requires_grad() && owned == shares.places.end()) continue;
      made.places.emplace(parameter.unsafeGetTensorImpl(), made.parameters.size());
      made.parameters.push_back(parameter);
      made.indices.push_back(here);
      made.param_groups.push_back(number);
      made.owners.push_back(owned == shares.places.end() ? -1 : shares.owners[owned->second]);
    }
  }
  choose_owners(made);
  return made;
}

OSSCore::ParamGroups OSSCore::State::own_part(const ParamGroups& groups, const OSSShares& of) const {
  auto part = empty_like(groups);
  for (size_t i = 0; i < of.parameters.size(); ++i) {
    if (of.owners[i] == group.rank()) part[of.param_groups[i]].params().push_back(of.parameters[i]);
  }
  return part;
}

std::vector<at::Tensor> OSSCore::State::own_gradients() const {
  std::vector<at::Tensor> gradients;
  for (size_t i = 0; i < shares.parameters.size(); ++i) {
    if (shares.owners[i] == group.rank() && shares.parameters[i].grad().defined())
      gradients.push_back(shares.parameters[i].grad());
  }
  return gradients;
}

void OSSCore::State::require_averaged() const {
  for (size_t i = 0; i < shares.parameters.size(); ++i) {
    require_no_local_gradient(shares.parameters[i], "OSS",
                              fmt::format("{} [{}]", shares.indices[i], fmt::join(shares.parameters[i].sizes(), ", ")));
  }
}

std::vector<StatePiece> OSSCore::State::pieces(const torch::nn::Module& module) const {
  std::vector<StatePiece> list;
  for (const auto& entry : walk(module, {}).parameters) {
    const auto place = shares.places.find(entry.tensor.unsafeGetTensorImpl());
    if (place == shares.places.end()) continue;
    const int owner = shares.owners[place->second];
    list.push_back({.name = entry.name,
                    .parameter = entry.tensor,
                    .range = {0, entry.tensor.numel()},
                    .owner = owner,
                    .updated = owner == group.rank() ? entry.tensor : at::Tensor()});
  }
  return list;
}

OSSCore::OSSCore(const ParamGroups& groups, std::unique_ptr<torch::optim::OptimizerOptions> defaults, Factory make,
                 const Group& group, const OSSOptions& options)
    : torch::optim::Optimizer(groups, std::move(defaults)) {
  options.validate();
  state_ = std::make_unique<State>(State{.make = std::move(make), .group = group, .options = options});
  rebuild(groups, 0);
}

OSSCore::~OSSCore() = default;

void OSSCore::rebuild(ParamGroups groups, size_t given) {
  auto& state = *state_;
  OSSShares shares;
  std::unique_ptr<torch::optim::Optimizer> local;
  // Another rank's share may be refused where this one's is not.
  on_all_ranks(state.group, "param groups", [&] {
    shares = state.share(groups);
    materialize(shares.parameters);
    local = make_local(state.make, state.own_part(groups, shares), *defaults_, "OSS");
  });
  for (size_t number = given; number < groups.size(); ++number) {
    groups[number].set_options(local->param_groups()[number].options().clone());
  }
  agree(state.group, "the parameters and options of OSS", describe(groups));
  for (size_t number = given; number < groups.size(); ++number) {
    if (number < param_groups_.size()) {
      param_groups_[number].set_options(groups[number].options().clone());
    } else {
      param_groups_.push_back(std::move(groups[number]));
    }
  }
  state.take(std::move(shares), std::move(local));
  state.known = KnownParameters(param_groups_);
}

void OSSCore::refresh_trainable() {
  state_->require_known(*this);
  rebuild(param_groups_, param_groups_.size());
}

bool OSSCore::State::other_kinds(const ParamGroups& groups) const {
  for (const auto& buffer : buffers) {
    for (size_t i = 0; i < buffer->parameters().size(); ++i) {
      if (!buffer->watch().other_kind(i)) continue;
      const auto& parameter = buffer->parameters()[i];
      if (!buffer->watch().other_shape(i)) return true;
      throw UsageError(
          fmt::format("OSS: the shape of parameter {} has changed: {}; construct the optimizer again after changing it",
                      shares.indices[shares.places.at(parameter.unsafeGetTensorImpl())], buffer->watch().describe(i)));
    }
  }
  return lacks_trainable(groups);
}

void OSSCore::State::adopt_values() {
  std::vector<ChangedValue> values;
  for (const auto& buffer : buffers) {
    for (const auto piece : buffer->changed()) {
      const auto& parameter = buffer->parameters()[piece];
      values.push_back({fmt::format("{} [{}] of OSS", shares.indices[shares.places.at(parameter.unsafeGetTensorImpl())],
                                    fmt::join(parameter.sizes(), ", ")),
                        digest_of(parameter)});
    }
  }
  if (values.empty()) return;
  agree_on_values(group, values);
  for (const auto& buffer : buffers) {
    if (!buffer->changed().empty()) buffer->adopt(label("replaced parameters"));
  }
}

void OSSCore::adopt_changes() {
  if (state_->other_kinds(param_groups_)) {
    refresh_trainable();
  } else {
    state_->adopt_values();
  }
}

void OSSCore::add_param_group(const OptimizerParamGroup& group) {
  state_->require_known(*this);
  auto groups = param_groups_;
  groups.push_back(group);
  if (!group.has_options()) groups.back().set_options(defaults_->clone());
  rebuild(std::move(groups), param_groups_.size());
}

void OSSCore::add_parameters(const std::vector<at::Tensor>&) {
  throw UsageError("OSS: add_parameters would change the param groups of this rank alone; call add_param_group()");
}

void OSSCore::save(torch::serialize::OutputArchive&) const {
  refuse_archive("OSS");
}

void OSSCore::load(torch::serialize::InputArchive&) {
  refuse_archive("OSS");
}

at::Tensor OSSCore::step(LossClosure closure) {
  state_->require_known(*this);
  at::Tensor loss;
  if (closure != nullptr) {
    const at::AutoGradMode grad(true);
    loss = closure();
  }
  adopt_changes();
  auto& state = *state_;
  state.require_averaged();
  copy_options(param_groups_, state.local->param_groups());
  // Some rank may still read the values that are about to change.
  const bool shared =
      std::any_of(state.buffers.begin(), state.buffers.end(), [](const auto& b) { return b->shared(); });
  if (shared) state.group.barrier(state.label("before the update")).wait();
  {
    const UnwatchedOperators own;  // its writes are the parameters' updates
    state.local->step();
  }
  state.hand_out_updates();
  ++state.step;
  return loss;
}

bool OSSCore::step(GradScaler& scaler, double max_norm) {
  auto& state = *state_;
  state.require_averaged();
  auto found = at::full({1}, scaler.unscale(state.own_gradients()) ? 1 : 0, at::kInt);
  state.group.all_reduce(found, ReduceOp::max, state.label("inf or NaN in gradients")).wait();
  const bool finite = found.item<int>() == 0;
  scaler.update(!finite);
  if (finite && max_norm > 0) clip_grad_norm(max_norm);
  if (finite) step();
  return finite;
}

OptimizerState OSSCore::state_dict(const torch::nn::Module& module, std::optional<int> recipient) const {
  state_->require_known(*this);
  return gather_state(state_->group, state_->pieces(module), *state_->local, recipient);
}

void OSSCore::load_state_dict(const torch::nn::Module& module, const OptimizerState& state) {
  state_->require_known(*this);
  load_state(state_->group.rank(), state_->pieces(module), *state_->local, state);
}

double OSSCore::clip_grad_norm(double max_norm, double norm_type) {
  state_->require_known(*this);
  state_->require_averaged();
  const auto gradients = state_->own_gradients();
  const auto label = state_->label("norm of the gradients");
  double norm = 0;
  if (norm_type == 0) {  // torch's: how many parameters have a gradient
    auto count = at::full({1}, static_cast<int64_t>(gradients.size()), at::kLong);
    state_->group.all_reduce(count, ReduceOp::sum, label).wait();
    norm = static_cast<double>(count.item<int64_t>());
  } else {
    norm = global_norm(gradients, norm_type, state_->group, label);
  }
  clip_to_norm(gradients, norm, max_norm);
  return norm;
}

std::vector<std::vector<at::Tensor>> OSSCore::partition() const {
  std::vector<std::vector<at::Tensor>> shares(state_->group.size());
  for (size_t i = 0; i < state_->shares.parameters.size(); ++i) {
    const auto& parameter = state_->shares.parameters[i];
    if (parameter.requires_grad()) shares[state_->shares.owners[i]].push_back(parameter);
  }
  return shares;
}

int OSSCore::param_to_rank(const at::Tensor& parameter) const {
  const auto place = state_->shares.places.find(parameter.unsafeGetTensorImpl());
  if (place == state_->shares.places.end())
    throw UsageError("OSS: the tensor is not one of this optimizer's parameters");
  return state_->shares.owners[place->second];
}

size_t OSSCore::param_to_index(const at::Tensor& parameter) const {
  const auto place = state_->shares.places.find(parameter.unsafeGetTensorImpl());
  if (place == state_->shares.places.end())
    throw UsageError("OSS: the tensor is not one of this optimizer's parameters");
  return state_->shares.indices[place->second];
}

std::vector<at::Tensor> OSSCore::local_params() const {
  return partition()[state_->group.rank()];
}

const Group& OSSCore::group() const {
  return state_->group;
}

const torch::optim::Optimizer& OSSCore::local_optimizer() const {
  return *state_->local;
}

}  // namespace shoal
