// OSS in elastic jobs whose ranks share no memory: parameters have second owners.

#include <c10/util/ScopeExit.h>
#include <fmt/format.h>

#include <utility>

#include "comm/group/hosts.h"
#include "engine/sharded/early_use.h"
#include "engine/sharded/second_owner_check.h"
#include "shoal/error.h"
#include "strategy/zero/oss_state.h"

namespace shoal {

OSSCore::ParamGroups OSSCore::State::enable_second_owners(const ParamGroups& groups) {
  second_shards.owners = choose_second_owners(hosts_of(group));
  second_shards.changed.assign(buffers.size(), 1);
  second_shards.written = false;
  second_shards.outdated.forget_early_use();  // of a step in which a rank has ended
  return own_part(groups);
}

std::vector<at::Tensor> OSSCore::State::disable_second_owners() {
  std::vector<at::Tensor> list;
  for_owned([&](size_t place, int owner) {
    if (owner != group.rank()) list.push_back(shares.parameters[place]);
  });
  second_shards.owners.clear();
  second_shards.outdated.end();
  second_shards.gradients.reset();
  return list;
}

// In the order of the shares.
OSSCore::ParamGroups OSSCore::State::own_part(const ParamGroups& groups) {
  std::unordered_map<const c10::TensorImpl*, size_t> numbers;
  for (size_t number = 0; number < groups.size(); ++number) {
    for (const auto& parameter : groups[number].params()) numbers[parameter.unsafeGetTensorImpl()] = number;
  }
  auto part = empty_like(groups);
  for_owned([&](size_t place, int) {
    const auto& parameter = shares.parameters[place];
    part[numbers.at(parameter.unsafeGetTensorImpl())].params().push_back(parameter);
  });
  return part;
}

std::vector<ShardSource::Shard> OSSCore::State::shards() const {
  const auto names = shard_names();
  std::vector<ShardSource::Shard> list;
  for_owned([&](size_t place, int owner) {
    const auto& parameter = shares.parameters[place];
    if (parameter.numel() == 0) return;  // nothing to give
    list.push_back({names.at(parameter.unsafeGetTensorImpl()),
                    {.values = parameter, .parameter = parameter, .range = {0, parameter.numel()}},
                    state_of(*local, parameter),
                    owner});
  });
  return list;
}

OSSCore::State::ShardNames OSSCore::State::shard_names() const {
  ShardNames names;
  for (const auto& parameter : shares.parameters) {
    names[parameter.unsafeGetTensorImpl()] = "parameter " + describe(parameter);
  }
  return names;
}

void OSSCore::State::adopt_alone() {
  if (!has_new_values()) return;
  second_shards.written = true;
  separate_replaced();
  for (const auto& buffer : buffers) buffer->adopt_alone();
  if (lone_watch) lone_watch->note();
}

bool OSSCore::State::has_stand_in(size_t place, int owner) const {
  const auto& parameter = shares.parameters[place];
  return owner != group.rank() && second_shards.gradients && second_shards.gradients->has(parameter) &&
         parameter.numel() > 0;
}

at::Tensor OSSCore::State::gradient_of(size_t place, int owner) const {
  const auto& parameter = shares.parameters[place];
  return has_stand_in(place, owner) ? second_shards.gradients->of(parameter) : parameter.grad();
}

// A program may change gradients, or one owner's alone: a digest of all elements tells whether both owners have the
// same.
void OSSCore::State::check_second_owners() {
  SecondOwnerCheck check{.gradients = std::map<int, uint64_t>(), .options = commit.options, .updates = steps};
  add_own_state(check);
  for_owned([&](size_t place, int owner) {
    check.add_element(owner, shares.parameters[place]);
    const auto gradient = gradient_of(place, owner);
    const bool sparse = gradient.defined() && gradient.layout() != at::kStrided;
    check.asks = check.asks || sparse;  // for an error on all ranks
    if (!sparse) check.add_gradient(owner, gradient);
  });
  const auto answer = check.ask(group, second_shards.owners, {-1, -1, "whether both owners have the same"});
  if (answer.asked) {
    throw UsageError(
        "Elastic: sparse gradients are not supported where parameters have second owners, on several hosts or over "
        "sockets: make them dense");
  }
  const auto& differs = answer.differs;
  if (!differs) return;
  if (second_shards.gradients)
    return second_shards.gradients->send_again(shares.parameters, shares.owners, second_shards.owners);
  throw DisagreeError(
      fmt::format("rank {} and rank {}, which own the same parameters in an elastic job, have different gradients of "
                  "them: change gradients alike on all ranks, not on a parameter's owner alone",
                  *differs, second_shards.owners[static_cast<size_t>(*differs)]));
}

void OSSCore::State::seal_gradients() {
  if (!second_owners) return;
  second_shards.seen.clear();
  for_owned([&](size_t place, int owner) { second_shards.seen.emplace_back(gradient_of(place, owner)); });
  if (second_shards.gradients) second_shards.remains = second_shards.gradients->remains();
}

void OSSCore::State::require_sealed() const {
  if (!second_owners) return;
  bool same = !second_shards.gradients || second_shards.remains == second_shards.gradients->remains();
  size_t number = 0;
  for_owned(
      [&](size_t place, int owner) { same = second_shards.seen[number++].is(gradient_of(place, owner)) && same; });
  if (!same) throw UsageError(GuardedUpdate::late_change);
}

// The copies take the place of tensors without memory meanwhile.
void OSSCore::State::step_owned() {
  std::vector<std::pair<at::Tensor, at::Tensor>> stand_ins;
  const auto put_back = c10::make_scope_exit([&] {
    for (auto& [parameter, stand_in] : stand_ins) parameter.mutable_grad() = stand_in;
  });
  for_owned([&](size_t place, int owner) {
    if (!has_stand_in(place, owner)) return;
    auto parameter = shares.parameters[place];
    stand_ins.emplace_back(parameter, parameter.grad());
    parameter.mutable_grad() = gradient_of(place, owner);
  });
  local->step();
}

// Not a frozen parameter without a gradient, which no rank has updated.
void OSSCore::State::begin_outdated() {
  std::vector<std::pair<std::string, at::Tensor>> outdated;
  for (const auto& buffer : buffers) {
    for (size_t i = 0; i < buffer->homes().size(); ++i) {
      const auto& parameter = buffer->parameters()[i];
      const bool rests = !parameter.requires_grad() && !parameter.grad().defined();
      if (!rests) outdated.emplace_back(describe(parameter) + " of OSS", buffer->homes()[i]);
    }
  }
  second_shards.outdated.begin(outdated);
}

// Also of ranks that have left this update out, which the next commit says: so the number of updates is not in the
// labels.
void OSSCore::State::publish_deferred_update() {
  if (!second_owners) return;
  const torch::NoGradGuard no_grad;
  second_shards.outdated.end();
  try {
    hand_out_update(second_shards.changed, {-1, -1, "updated parameters"});
  } catch (...) {
    begin_outdated();
    throw;
  }
  second_shards.changed = changed_buffers(/*updated=*/false);
  // No rank goes on, and writes parameters between steps, before all have them: in a division, those of all are as they
  // were sent.
  meet_without_early_use(group, second_shards.outdated.take_early_use(),
                         {-1, -1, "whether all have the updated parameters"});
}

}  // namespace shoal
