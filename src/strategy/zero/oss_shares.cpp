// Assignment of parameters to owners, also after freezing and unfreezing, and distribution of state and values.

#include <fmt/format.h>
#include <torch/utils.h>

#include <algorithm>

#include "engine/sharded/ownership.h"
#include "optim/state.h"
#include "shoal/group.h"
#include "strategy/zero/oss_state.h"

namespace shoal {
namespace {

// Those of `all` with these places.
template <class T>
std::vector<T> chosen(const std::vector<T>& all, const std::vector<size_t>& places) {
  std::vector<T> list;
  for (const auto place : places) list.push_back(all[place]);
  return list;
}

std::vector<size_t> places_where(const OSSShares& shares, bool trainable) {
  std::vector<size_t> places;
  for (size_t i = 0; i < shares.parameters.size(); ++i) {
    if (shares.parameters[i].requires_grad() == trainable) places.push_back(i);
  }
  return places;
}

}  // namespace

OSSShares::Pattern OSSShares::trainable() const {
  Pattern pattern;
  for (const auto place : places_where(*this, true)) pattern.push_back(parameters[place].unsafeGetTensorImpl());
  return pattern;
}

bool OSSCore::State::is_balanced() const {
  // A program may freeze other parameters in every step; moving their state each time would cost more than it gives.
  constexpr size_t most = 8;
  return balanced_for.size() >= most || balanced_for.contains(shares.trainable());
}

bool OSSCore::State::lacks_trainable(const ParamGroups& groups) const {
  return std::any_of(groups.begin(), groups.end(), [this](const auto& param_group) {
    return std::any_of(param_group.params().begin(), param_group.params().end(), [this](const at::Tensor& parameter) {
      return parameter.requires_grad() && !shares.places.contains(parameter.unsafeGetTensorImpl());
    });
  });
}

// Trainable elements are balanced among themselves. A frozen parameter that has an owner stays with it.
void OSSCore::State::choose_owners(OSSShares& made) const {
  const bool movable = local && is_state_known(*local);
  for (const bool trainable : {true, false}) {
    const auto places = places_where(made, trainable);
    const auto parameters = chosen(made.parameters, places);
    auto owners = chosen(made.owners, places);
    assign_owners(parameters, group.size(), owners);
    if (trainable && movable) balance_owners(parameters, group.size(), owners);
    for (size_t i = 0; i < places.size(); ++i) made.owners[places[i]] = owners[i];
  }
}

void OSSCore::State::take(OSSShares fresh, std::unique_ptr<torch::optim::Optimizer> optimizer) {
  std::vector<at::Tensor> fresh_ones;
  for (const auto& parameter : fresh.parameters) {
    if (!shares.places.contains(parameter.unsafeGetTensorImpl())) fresh_ones.push_back(parameter);
  }
  if (local) {
    move_states(fresh, *optimizer);
    for (auto& [parameter, state] : local->state()) {
      const auto stays = fresh.places.contains(static_cast<const c10::TensorImpl*>(parameter));
      if (stays) optimizer->state()[parameter] = std::move(state);
    }
  }
  shares = std::move(fresh);
  local = std::move(optimizer);
  broadcast_coalesced(group, fresh_ones, 0, label("parameters of OSS"));
  fill_buffers();
  ++times_shared;
  balanced_for.insert(shares.trainable());
}

// State of parameters that have another owner now goes to `to` there.
void OSSCore::State::move_states(const OSSShares& fresh, torch::optim::Optimizer& to) {
  for (int receiver = 0; receiver < group.size(); ++receiver) {
    std::vector<StatePiece> pieces;
    for (size_t i = 0; i < fresh.parameters.size(); ++i) {
      const auto& parameter = fresh.parameters[i];
      const auto before = shares.places.find(parameter.unsafeGetTensorImpl());
      if (before == shares.places.end() || fresh.owners[i] != receiver) continue;
      const int sender = shares.owners[before->second];
      if (sender == receiver) continue;
      pieces.push_back({.name = fmt::format("{}", fresh.indices[i]),
                        .parameter = parameter,
                        .range = {0, parameter.numel()},
                        .owner = sender,
                        .updated = sender == group.rank() ? parameter : at::Tensor()});
    }
    if (pieces.empty()) continue;
    const auto moved = gather_state(group, pieces, *local, receiver);
    for (auto& piece : pieces) {
      local->state().erase(piece.parameter.unsafeGetTensorImpl());
      piece.owner = receiver;
      piece.updated = piece.parameter;
    }
    if (receiver == group.rank()) load_state(receiver, pieces, to, moved);
  }
}

// What is frozen lies apart, so that steps need not send it.
void OSSCore::State::fill_buffers() {
  buffers.clear();
  if (group.size() == 1) return;
  for (const bool trainable : {true, false}) {
    const auto places = places_where(shares, trainable);
    const auto parameters = chosen(shares.parameters, places);
    for (auto& [members, layout, ranges] : owned_buffers(parameters, chosen(shares.owners, places), group.size())) {
      const auto wire = options.broadcast_fp16 ? std::optional(at::kHalf) : std::nullopt;
      buffers.push_back(std::make_unique<ParameterBuffer>(
          group, chosen(parameters, members), std::move(layout), std::move(ranges),
          HostSharedBufferOptions{.broadcast_numel = options.broadcast_buffer_size, .published_as = wire},
          label("parameters of OSS")));
    }
  }
}

void OSSCore::State::hand_out(const char* what) {
  for (const auto& buffer : buffers) buffer->publish(label(what));
  for (const auto& buffer : buffers) buffer->wait(label(what));
}

// An optimizer updates what has a gradient, frozen or not, so owners say whether they have one of a frozen parameter.
void OSSCore::State::hand_out_updates() {
  const auto frozen = [](const at::Tensor& parameter) { return !parameter.requires_grad(); };
  const auto own_gradient = [this](const at::Tensor& parameter) {
    return shares.owners[shares.places.at(parameter.unsafeGetTensorImpl())] == group.rank() &&
           parameter.grad().defined();
  };
  std::vector<int> changes;
  bool ask = false;
  for (const auto& buffer : buffers) {
    const auto& members = buffer->parameters();
    const bool rests = !buffer->shared() && std::all_of(members.begin(), members.end(), frozen);
    ask = ask || rests;
    changes.push_back(!rests || std::any_of(members.begin(), members.end(), own_gradient) ? 1 : 0);
  }
  if (ask) {
    auto all = at::tensor(changes, at::kInt);
    group.all_reduce(all, ReduceOp::max, label("frozen parameters that are updated")).wait();
    changes.assign(all.data_ptr<int>(), all.data_ptr<int>() + all.numel());
  }
  const auto updated = label("updated parameters");
  for (size_t i = 0; i < buffers.size(); ++i) {
    if (changes[i] != 0) buffers[i]->publish(updated);
  }
  for (size_t i = 0; i < buffers.size(); ++i) {
    if (changes[i] != 0) buffers[i]->wait(updated);
  }
}

ShareSizes OSSCore::share_sizes() const {
  const auto& shares = state_->shares;
  ShareSizes sizes{.trainable = std::vector<int64_t>(state_->group.size()),
                   .frozen = std::vector<int64_t>(state_->group.size())};
  for (size_t i = 0; i < shares.parameters.size(); ++i) {
    const auto& parameter = shares.parameters[i];
    (parameter.requires_grad() ? sizes.trainable : sizes.frozen)[shares.owners[i]] += parameter.numel();
    if (parameter.requires_grad()) sizes.largest = std::max(sizes.largest, parameter.numel());
  }
  return sizes;
}

}  // namespace shoal
