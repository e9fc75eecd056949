// Assignment of parameters to owners, also after freezing and unfreezing, and distribution of state and values.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <c10/util/Type.h>

#include <algorithm>
#include <typeinfo>

#include "engine/changes/separate_memory.h"
#include "engine/sharded/ownership.h"
#include "engine/wrapper/module_checks.h"
#include "optim/state.h"
#include "shoal/deferred_init.h"
#include "shoal/error.h"
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

size_t OSSShares::place_of(const at::Tensor& parameter) const {
  const auto place = places.find(parameter.unsafeGetTensorImpl());
  if (place == places.end()) throw UsageError("OSS: the tensor is not one of this optimizer's parameters");
  return place->second;
}

std::optional<int> OSSShares::owner_of(const at::Tensor& parameter) const {
  const auto place = places.find(parameter.unsafeGetTensorImpl());
  return place == places.end() ? std::nullopt : std::optional(owners[place->second]);
}

std::vector<NamedTensor> OSSShares::named() const {
  std::vector<NamedTensor> list;
  for (size_t i = 0; i < parameters.size(); ++i) {
    list.push_back({.name = fmt::format("parameter {}", indices[i]), .aliases = {}, .tensor = parameters[i]});
  }
  return list;
}

void OSSCore::State::refuse_new_shares(const ParamGroups& groups) {
  may_move = false;
  std::string change = "the shares were to be made anew (refresh_trainable(), add_param_group())";
  size_t index = 0;
  for (const auto& param_group : groups) {
    for (const auto& parameter : param_group.params()) {
      const auto here = index++;
      if (lacks_owner(parameter)) {
        change = fmt::format("parameter {} [{}] was unfrozen or added", here, fmt::join(parameter.sizes(), ", "));
      }
    }
  }
  for (const auto& buffer : buffers) {
    for (size_t i = 0; i < buffer->parameters().size(); ++i) {
      if (!buffer->watch().other_kind(i)) continue;
      change =
          fmt::format("parameter {} was converted: {}", describe(buffer->parameters()[i]), buffer->watch().describe(i));
    }
  }
  throw UsageError(
      fmt::format("OSS: {}, which is not supported in an elastic job: do it before Elastic is constructed, on all "
                  "ranks",
                  change));
}

ParamGroups OSSCore::State::shares_of(const ParamGroups& groups) {
  if (has_commit()) refuse_new_shares(groups);
  OSSShares made;
  std::unordered_map<const c10::TensorImpl*, size_t> seen;
  size_t index = 0;
  for (size_t number = 0; number < groups.size(); ++number) {
    for (const auto& parameter : groups[number].params()) {
      const auto here = index++;
      const auto [before, first] = seen.emplace(parameter.unsafeGetTensorImpl(), number);
      // libtorch's parameters() lists a tied one once per name.
      if (!first && before->second == number) continue;
      const auto refuse = [&](const std::string& fault) {
        throw UsageError(fmt::format("OSS: parameter {} [{}] is {}", here, fmt::join(parameter.sizes(), ", "), fault));
      };
      if (!first) refuse(fmt::format("in param groups {} and {}; remove it from one", before->second, number));
      if (!parameter.is_leaf()) refuse("not a leaf tensor, but the result of an operator; detach it");
      const auto owner = shares.owner_of(parameter);
      const bool wanted = parameter.requires_grad() || owned_though_frozen.contains(parameter.unsafeGetTensorImpl());
      if (!wanted && !owner) continue;
      require_usable(parameter, fmt::format("parameter {} [{}]", here, fmt::join(parameter.sizes(), ", ")), "OSS");
      made.places.emplace(parameter.unsafeGetTensorImpl(), made.parameters.size());
      made.parameters.push_back(parameter);
      made.indices.push_back(here);
      made.owners.push_back(anew ? -1 : owner.value_or(-1));
    }
  }
  require_separate_memory(made.named(), {}, "OSS");
  choose_owners(made);
  materialize(made.parameters);
  auto part = empty_like(groups);
  for (size_t i = 0; i < made.parameters.size(); ++i) {
    const auto number = seen.at(made.parameters[i].unsafeGetTensorImpl());
    if (made.owners[i] == group.rank()) part[number].params().push_back(made.parameters[i]);
  }
  next = std::move(made);
  return part;
}

bool OSSCore::State::is_balanced() const {
  if (has_commit()) return true;  // owners stay as they are in an elastic job
  // A program may freeze other parameters in every step; moving their state each time would cost more than it gives.
  constexpr size_t most = 8;
  return balanced_for.size() >= most || balanced_for.contains(shares.trainable());
}

bool OSSCore::State::lacks_owner(const at::Tensor& parameter) const {
  const bool wanted = parameter.requires_grad() || owned_though_frozen.contains(parameter.unsafeGetTensorImpl());
  return wanted && !shares.owner_of(parameter);
}

bool OSSCore::State::lacks_trainable(const ParamGroups& groups) const {
  return std::any_of(groups.begin(), groups.end(), [this](const auto& param_group) {
    const auto& list = param_group.params();
    return std::any_of(list.begin(), list.end(), [this](const auto& parameter) { return lacks_owner(parameter); });
  });
}

// Trainable elements are balanced among themselves. A frozen parameter that has an owner stays with it.
void OSSCore::State::choose_owners(OSSShares& made) const {
  const bool movable = may_move && local && is_state_known(*local);
  const int ranks = this->owners.value_or(group.size());
  for (const bool trainable : {true, false}) {
    const auto places = places_where(made, trainable);
    const auto parameters = chosen(made.parameters, places);
    auto owners = chosen(made.owners, places);
    assign_owners(parameters, ranks, owners);
    if (trainable && movable) balance_owners(parameters, ranks, owners);
    for (size_t i = 0; i < places.size(); ++i) made.owners[places[i]] = owners[i];
  }
}

void OSSCore::State::replicate(const Group& all, int ranks, bool equal, OSSCore& optimizer) {
  everybody = all;
  auto lines = shoal::describe(optimizer.param_groups());
  const auto& update = *local;
  lines.push_back(c10::demangle(typeid(update).name()));
  lines.push_back(fmt::format("broadcast_fp16 {}", options.broadcast_fp16));
  agree(all, "the parameters and options of OSS on each host", lines);
  if (options.broadcast_fp16) {
    throw UsageError("OSS: broadcast_fp16 rounds what a host sends, and by_host() nothing is sent: unset it");
  }
  if (equal || owners == ranks) return;
  owners = ranks;
  anew = true;  // also on hosts with so many ranks, whose shares may have a history
  optimizer.refresh_trainable();
}

bool OSSCore::State::has_new_values() const {
  if (lone_watch) return lone_watch->changed();
  return std::any_of(buffers.begin(), buffers.end(), [](const auto& buffer) { return !buffer->changed().empty(); });
}

std::vector<ChangedValue> OSSCore::State::values() const {
  std::vector<ChangedValue> list;
  for (const auto& parameter : shares.parameters)
    list.push_back({describe(parameter) + " of OSS", digest_of(parameter)});
  return list;
}

void OSSCore::State::take_shares(std::unique_ptr<torch::optim::Optimizer> made) {
  std::vector<at::Tensor> fresh;
  for (const auto& parameter : next.parameters) {
    if (!shares.owner_of(parameter)) fresh.push_back(parameter);
  }
  if (local) {
    move_states(*made);
    for (auto& [parameter, state] : local->state()) {
      const auto stays = next.places.contains(static_cast<const c10::TensorImpl*>(parameter));
      if (stays) made->state()[parameter] = std::move(state);
    }
  }
  anew = false;
  shares = std::exchange(next, {});
  local = std::move(made);
  broadcast_coalesced(everybody.value_or(group), fresh, 0, label("parameters of OSS"));
  fill_buffers();
  ++times_shared;
  if (may_move) balanced_for.insert(shares.trainable());
  may_move = false;
}

// State of parameters that have another owner now goes to `to` there.
void OSSCore::State::move_states(torch::optim::Optimizer& to) {
  for (int receiver = 0; receiver < group.size(); ++receiver) {
    std::vector<StatePiece> pieces;
    for (size_t i = 0; i < next.parameters.size(); ++i) {
      const auto& parameter = next.parameters[i];
      const int sender = shares.owner_of(parameter).value_or(receiver);  // a fresh one has no state
      if (next.owners[i] != receiver || sender == receiver) continue;
      pieces.push_back({.name = fmt::format("{}", next.indices[i]),
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
    if (receiver == group.rank()) load_state(receiver, pieces, to, moved, StateDtypes::kept);
  }
}

// What is frozen lies apart, so that steps need not send it.
void OSSCore::State::fill_buffers() {
  const auto former = std::exchange(buffers, {});  // its parameters have moved when it is destroyed
  lone_watch.reset();
  if (group.size() == 1) {
    lone_watch.emplace(shares.parameters, ParameterWatch::Versions::counted);
    return;
  }
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

void OSSCore::State::hand_out(const Label& label, const std::vector<int>& changed) {
  const auto each = [&](const auto& act) {
    for (size_t i = 0; i < buffers.size(); ++i) {
      if (changed.empty() || changed[i] != 0) act(*buffers[i]);
    }
  };
  each([&](ParameterBuffer& buffer) {
    buffer.take_moved();
    buffer.publish(label);
  });
  each([&](ParameterBuffer& buffer) { buffer.wait(label); });
}

namespace {

// Nothing of it is trainable, and the other ranks see nothing change.
bool rests(const ParameterBuffer& buffer) {
  const auto& members = buffer.parameters();
  return !buffer.shared() &&
         std::none_of(members.begin(), members.end(), [](const auto& parameter) { return parameter.requires_grad(); });
}

}  // namespace

// An optimizer updates what has a gradient, frozen or not, so owners say whether they have one of a frozen parameter.
std::vector<int> OSSCore::State::changed_buffers(bool updated) const {
  const auto own_gradient = [this](const at::Tensor& parameter) {
    return shares.owner_of(parameter) == group.rank() && parameter.grad().defined();
  };
  std::vector<int> changed;
  for (const auto& buffer : buffers) {
    const auto& members = buffer->parameters();
    const bool has_gradient = updated && std::any_of(members.begin(), members.end(), own_gradient);
    changed.push_back(!rests(*buffer) || has_gradient ? 1 : 0);
  }
  return changed;
}

void OSSCore::State::hand_out_update(std::vector<int> changed, const Label& label) {
  if (std::any_of(buffers.begin(), buffers.end(), [](const auto& buffer) { return rests(*buffer); })) {
    auto all = at::tensor(changed, at::kInt);
    group.all_reduce(all, ReduceOp::max, {label.step, -1, "frozen parameters that are updated"}).wait();
    changed.assign(all.data_ptr<int>(), all.data_ptr<int>() + all.numel());
  }
  hand_out(label, changed);
}

void OSSCore::State::publish() {
  if (wrapper) wrapper->updated = wrapper->steps ? wrapper->steps() : wrapper->reduced;
  const auto changed = changed_buffers(/*updated=*/true);
  if (second_owners) {
    second_shards.changed = changed;
    second_shards.written = false;
    second_shards.seen.clear();
    second_shards.outdated.forget_early_use();
    return begin_outdated();
  }
  hand_out_update(changed, label("updated parameters"));
  if (lone_watch) lone_watch->note();
}

}  // namespace shoal
