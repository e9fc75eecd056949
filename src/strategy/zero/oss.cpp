#include "shoal/strategy/zero/oss.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/utils.h>

#include <algorithm>

#include "engine/gradient_norm.h"
#include "engine/ownership.h"
#include "module/walk.h"
#include "optim/param_groups.h"
#include "shoal/base/error.h"
#include "shoal/comm/agree.h"
#include "shoal/comm/coalesce.h"
#include "shoal/module/deferred_init.h"
#include "strategy/zero/oss_state.h"

namespace shoal {

using torch::optim::OptimizerParamGroup;

void OSSOptions::validate() const {
  if (broadcast_buffer_size == 0 || broadcast_buffer_size < -1) {
    throw UsageError(fmt::format("OSS: broadcast_buffer_size {}: give elements, or -1 for a rank's whole share",
                                 broadcast_buffer_size));
  }
}

// Trainable parameters; those that were here before keep their owner.
std::vector<at::Tensor> OSSCore::State::list(const ParamGroups& groups) {
  std::vector<at::Tensor> fresh_ones;
  const auto old_places = std::move(places);
  const auto old_owners = std::move(owners);
  parameters.clear();
  indices.clear();
  param_groups.clear();
  owners.clear();
  places.clear();
  size_t index = 0;
  for (size_t number = 0; number < groups.size(); ++number) {
    for (const auto& parameter : groups[number].params()) {
      const auto here = index++;
      if (!parameter.requires_grad()) continue;
      const auto [place, fresh] = places.emplace(parameter.unsafeGetTensorImpl(), parameters.size());
      if (!fresh) {
        // libtorch's parameters() lists a tied one once per name.
        if (param_groups[place->second] == number) continue;
        throw UsageError(fmt::format("OSS: parameter {} [{}] is in two param groups; leave it in one", here,
                                     fmt::join(parameter.sizes(), ", ")));
      }
      parameters.push_back(parameter);
      indices.push_back(here);
      param_groups.push_back(number);
      const auto before = old_places.find(parameter.unsafeGetTensorImpl());
      owners.push_back(before == old_places.end() ? -1 : old_owners[before->second]);
      if (before == old_places.end()) fresh_ones.push_back(parameter);
    }
  }
  assign_owners(parameters, group.size(), owners);
  return fresh_ones;
}

void OSSCore::State::fill_buffers() {
  buffers.clear();
  if (group.size() == 1) return;
  for (auto& [members, layout, ranges] : owned_buffers(parameters, owners, group.size())) {
    std::vector<at::Tensor> tensors;
    for (const auto member : members) tensors.push_back(parameters[member]);
    const auto wire = options.broadcast_fp16 ? std::optional(at::kHalf) : std::nullopt;
    buffers.push_back(std::make_unique<ParameterBuffer>(
        group, std::move(tensors), std::move(layout), std::move(ranges),
        OnceBufferOptions{.broadcast_numel = options.broadcast_buffer_size, .published_as = wire},
        label("parameters of OSS")));
  }
}

void OSSCore::State::make_local(const ParamGroups& groups) {
  auto share = empty_like(groups);
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (owners[i] == group.rank()) share[param_groups[i]].params().push_back(parameters[i]);
  }
  auto fresh = make(share);
  if (local) {
    for (auto& [parameter, state] : local->state()) {
      const auto place = places.find(static_cast<const c10::TensorImpl*>(parameter));
      if (place != places.end()) fresh->state()[parameter] = std::move(state);
    }
  }
  local = std::move(fresh);
}

std::vector<at::Tensor> OSSCore::State::own_gradients() const {
  std::vector<at::Tensor> gradients;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (owners[i] == group.rank() && parameters[i].grad().defined()) gradients.push_back(parameters[i].grad());
  }
  return gradients;
}

std::vector<StatePiece> OSSCore::State::pieces(const torch::nn::Module& module) const {
  std::vector<StatePiece> list;
  for (const auto& entry : walk(module, {}).parameters) {
    const auto place = places.find(entry.tensor.unsafeGetTensorImpl());
    if (place == places.end()) continue;
    const int owner = owners[place->second];
    list.push_back({.name = entry.name,
                    .parameter = entry.tensor,
                    .range = {0, entry.tensor.numel()},
                    .owner = owner,
                    .updated = owner == group.rank() ? entry.tensor : at::Tensor()});
  }
  return list;
}

void OSSCore::State::hand_out(const char* what) {
  for (const auto& buffer : buffers) buffer->publish(label(what));
  for (const auto& buffer : buffers) buffer->wait(label(what));
}

OSSCore::OSSCore(const ParamGroups& groups, std::unique_ptr<torch::optim::OptimizerOptions> defaults, Factory make,
                 const Group& group, const OSSOptions& options)
    : torch::optim::Optimizer(groups, std::move(defaults)) {
  options.validate();
  state_ = std::make_unique<State>(State{.make = std::move(make), .group = group, .options = options});
  refresh_trainable();
}

OSSCore::~OSSCore() = default;

void OSSCore::refresh_trainable() {
  auto& state = *state_;
  agree(state.group, "the parameters and options of OSS", describe(param_groups_));
  const auto fresh = state.list(param_groups_);
  materialize(fresh);
  broadcast_coalesced(state.group, fresh, 0, state.label("parameters of OSS"));
  state.fill_buffers();
  state.make_local(param_groups_);
}

void OSSCore::add_param_group(const OptimizerParamGroup& group) {
  torch::optim::Optimizer::add_param_group(group);
  refresh_trainable();
}

at::Tensor OSSCore::step(LossClosure closure) {
  at::Tensor loss;
  if (closure != nullptr) {
    const at::AutoGradMode grad(true);
    loss = closure();
  }
  auto& state = *state_;
  copy_options(param_groups_, *state.local);
  // Some rank may still read the values that are about to change.
  const bool shared =
      std::any_of(state.buffers.begin(), state.buffers.end(), [](const auto& b) { return b->shared(); });
  if (shared) state.group.barrier(state.label("before the update")).wait();
  state.local->step();
  state.hand_out("updated parameters");
  ++state.step;
  return loss;
}

bool OSSCore::step(GradScaler& scaler, double max_norm) {
  auto& state = *state_;
  auto found = at::full({1}, scaler.unscale(state.own_gradients()) ? 1 : 0, at::kInt);
  state.group.all_reduce(found, ReduceOp::max, state.label("inf or NaN in gradients")).wait();
  const bool finite = found.item<int>() == 0;
  scaler.update(!finite);
  if (finite && max_norm > 0) clip_grad_norm(max_norm);
  if (finite) step();
  return finite;
}

OptimizerState OSSCore::state_dict(const torch::nn::Module& module, std::optional<int> recipient) const {
  return gather_state(state_->group, state_->pieces(module), *state_->local, recipient);
}

void OSSCore::load_state_dict(const torch::nn::Module& module, const OptimizerState& state) {
  load_state(state_->group.rank(), state_->pieces(module), *state_->local, state);
}

double OSSCore::clip_grad_norm(double max_norm, double norm_type) {
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
  for (size_t i = 0; i < state_->parameters.size(); ++i) shares[state_->owners[i]].push_back(state_->parameters[i]);
  return shares;
}

int OSSCore::param_to_rank(const at::Tensor& parameter) const {
  const auto place = state_->places.find(parameter.unsafeGetTensorImpl());
  if (place == state_->places.end()) throw UsageError("OSS: not one of the trainable parameters of this optimizer");
  return state_->owners[place->second];
}

size_t OSSCore::param_to_index(const at::Tensor& parameter) const {
  const auto place = state_->places.find(parameter.unsafeGetTensorImpl());
  if (place == state_->places.end()) throw UsageError("OSS: not one of the trainable parameters of this optimizer");
  return state_->indices[place->second];
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
