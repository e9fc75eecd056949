// Sharded optimizers by range in elastic jobs whose ranks share no memory: every share has a second owner, which makes the same
// updates. So a rank that has all gradients can finish its step alone, and no rank's end takes a share along.

#include <fmt/format.h>
#include <torch/utils.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <unordered_map>
#include <utility>

#include "comm/group/text.h"
#include "engine/sharded/second_copies.h"
#include "engine/sharded/sharded_ranges.h"
#include "memory/views.h"
#include "optim/param_groups.h"
#include "shoal/error.h"

namespace shoal {
namespace {

bool same(const std::optional<NamedState>& a, const std::optional<NamedState>& b) {
  if (!a || !b) return !a && !b;
  if (a->tensors.size() != b->tensors.size()) return false;
  return std::all_of(a->tensors.begin(), a->tensors.end(), [&](const auto& entry) {
    const auto other = b->tensors.find(entry.first);
    return other != b->tensors.end() && other->second.const_data_ptr() == entry.second.const_data_ptr() &&
           other->second.scalar_type() == entry.second.scalar_type() && other->second.sizes() == entry.second.sizes();
  });
}

std::optional<NamedState> state_of(const torch::optim::Optimizer& local, const at::Tensor& values) {
  const auto found = local.state().find(values.unsafeGetTensorImpl());
  if (found == local.state().end()) return std::nullopt;
  return named_state(*found->second);
}

// The elements as the program has them: in the parameter, or, if that rounds them, in the float32 copy where it has not been written.
at::Tensor current_values(const UpdateTarget& target) {
  const auto now = in_memory_order(target.parameter.detach()).narrow(0, target.range.begin, target.range.size());
  if (!target.rounded.defined()) return now;
  auto exact = in_memory_order(target.values.detach());
  if (at::equal(exact.to(now.scalar_type()), now)) return exact;
  exact = exact.clone();
  take_written(now, exact);
  return exact;
}

// What a rank says of divisions before another one is made. Of all ranks the most of each number; the least of what has to be equal is
// the most of minus it.
struct Said {
  static constexpr double nothing = -std::numeric_limits<double>::infinity();

  double sealed = nothing;
  double made = nothing, minus_made = nothing;
  double tries = 0;
  double updates = nothing, minus_updates = nothing;
  double has_second = 0, comes = 0, has_before = 0, has_written = 0;  // 1: yes

  Said most(const Group& group) const {
    using Numbers = std::array<double, sizeof(Said) / sizeof(double)>;
    auto numbers = std::bit_cast<Numbers>(*this);
    const auto all = group.all_reduce({numbers.begin(), numbers.end()}, ReduceOp::max, {-1, -1, "whose shards count"});
    std::copy(all.begin(), all.end(), numbers.begin());
    return std::bit_cast<Said>(numbers);
  }
};

}  // namespace

std::vector<Estate::Shard> ShardedOptimizerCore::State::shards() const {
  std::vector<Estate::Shard> list;
  for_pieces([&](const ShardedModule& module, const OwnedPiece& piece) {
    const auto& gradient = module.reducer().gradients()[piece.gradient];
    list.push_back({gradient.name,
                    {.values = piece.main, .parameter = gradient.parameter, .range = piece.slice.in_piece},
                    state_of(*local, piece.main)});
  });
  return list;
}

Estate ShardedOptimizerCore::State::shared_estate(const ParamGroups& groups) {
  std::unordered_map<const c10::TensorImpl*, std::string> names;
  for (const auto& gradient : modules.front()->reducer().gradients()) {
    names[gradient.parameter.unsafeGetTensorImpl()] = gradient.name;
  }
  const auto& held = this->held(groups);
  std::vector<Estate::Shard> list;
  for (size_t rank = 0; rank < held.targets().size(); ++rank) {
    for (size_t i = 0; i < held.targets()[rank].size(); ++i) {
      auto target = held.targets()[rank][i];
      if (target.range.empty()) continue;
      target.values = current_values(target);
      list.push_back({names.at(target.parameter.unsafeGetTensorImpl()), target, held.state(static_cast<int>(rank), i)});
    }
  }
  Estate estate(std::move(list));
  estate.set_written(true);
  return estate;
}

void ShardedOptimizerCore::State::complete_second() {
  const auto present = shards();
  bool unchanged = present.size() == second->updated.size();
  for (size_t i = 0; unchanged && i < present.size(); ++i) {
    unchanged = same(present[i].state, second->updated[i].state);
  }
  if (!unchanged) {
    throw UsageError(
        "Elastic: the state of the sharded optimizer was loaded or replaced, which is not supported here: load it "
        "before "
        "Elastic is constructed");
  }
  prepare_gradients();
  for (const auto& module : modules) module->complete_second(commit.options, label("second copies of gradients"));
}

// Also of ranks that have left this update out, which the next commit says: so its label has the number of reductions.
void ShardedOptimizerCore::State::publish_second() {
  if (!second) return;
  const torch::NoGradGuard no_grad;
  std::string early_use;  // by this rank alone, perhaps
  try {
    for (const auto& module : modules) module->publish_now({module->reducer().step(), -1, "updated parameters"});
  } catch (const UsageError& error) {
    early_use = error.what();
  }
  if (modules.front()->has_pages()) return;
  // No rank goes on, and writes parameters between steps, before all have them: in a division, those of all are as they were sent.
  const Label label{modules.front()->reducer().step(), -1, "whether all have the updated parameters"};
  if (group.all_reduce(early_use.empty() ? 0.0 : 1.0, ReduceOp::max, label) == 0) return;
  const auto texts = all_gather_text(group, early_use, label);
  const auto first = std::find_if(texts.begin(), texts.end(), [](const auto& text) { return !text.empty(); });
  throw UsageError(fmt::format("rank {}: {}", group.world_rank(static_cast<int>(first - texts.begin())), *first));
}

void ShardedOptimizerCore::State::seal_gradients() {
  if (!second) return;
  for_pieces([](const ShardedModule&, OwnedPiece& piece) { piece.sealed = piece.sum._version(); });
}

void ShardedOptimizerCore::State::require_sealed() const {
  if (!second) return;
  for_pieces([](const ShardedModule&, const OwnedPiece& piece) {
    if (piece.sealed != piece.sum._version()) throw UsageError(GuardedUpdate::late_change);
  });
}

void ShardedOptimizerCore::guard() {
  auto& state = this->state();
  auto& module = *state.modules.front();
  if (state.group.size() == 1 || module.shared()) return ShardedOptimizerBase::guard();
  if (state.second) return;
  const torch::NoGradGuard no_grad;
  module.wait_all();
  const Estate former(state.shards());
  module.hold_second();
  auto local = make_local(state.make, state.shares_of(param_groups_), *defaults_, state.name);
  copy_options(state.local->param_groups(), local->param_groups());
  state.local = std::move(local);
  state.second.emplace();
  former.fill(state.group, state.shards(), *state.local);
  state.second->updated = state.shards();
}

void ShardedOptimizerCore::unguard() {
  ShardedOptimizerBase::unguard();
  auto& state = this->state();
  if (!state.second) return;
  state.second.reset();
  for (auto& group : state.local->param_groups()) {
    std::erase_if(group.params(), [&](const at::Tensor& values) {
      const auto& pieces = state.modules.front()->second_pieces();
      const bool is_second = std::any_of(pieces.begin(), pieces.end(),
                                         [&](const OwnedPiece& piece) { return piece.main.is_same(values); });
      if (is_second) state.local->state().erase(values.unsafeGetTensorImpl());
      return is_second;
    });
  }
  state.modules.front()->drop_second();
}

void ShardedOptimizerCore::come_without_shards() {
  auto& state = this->state();
  if (state.second) return;  // it has come so far before, and has been told to wait for another try
  state.second.emplace();
  state.second->sealed = state.second->made = SecondOwnership::none;
  state.second->comes = true;
  state.second->former.emplace();
}

void ShardedOptimizerCore::State::seal(int64_t division) {
  second->sealed = division;
  if (second->grows && !second->before) second->before = std::move(second->former);
  second->former.reset();
  second->comes = false;
  guarded.reset();  // of before, where ranks shared their memory
  alone.reset();
}

// A division counts if some rank knows that all have made it, or if all that are left have. Then all of them have it here.
void ShardedOptimizerCore::begin_regroup(const Group& group, bool apart) {
  auto& state = this->state();
  for (const auto& module : state.modules) module->end_outdated();
  const SecondOwnership first;
  const auto& own = state.second ? *state.second : first;
  const bool has_none = own.sealed == SecondOwnership::none;
  Said said{.tries = static_cast<double>(own.tries)};
  if (!has_none) {
    said.sealed = static_cast<double>(own.sealed);
    said.made = static_cast<double>(own.made);
    said.minus_made = -said.made;
  }
  if (state.second && !has_none && !own.former) {
    said.updates = static_cast<double>(state.steps);
    said.minus_updates = -said.updates;
  }
  said.has_second = state.second ? 1 : 0;
  said.comes = own.comes ? 1 : 0;
  said.has_before = own.before ? 1 : 0;
  said.has_written = state.second && !own.former && state.modules.front()->is_written() ? 1 : 0;
  const auto most = said.most(group);
  if (std::isfinite(most.updates) && most.updates != -most.minus_updates) refuse_unequal_updates();
  if (most.has_second == 0 && !apart) return;  // ranks share their memory, as before
  const bool had_second = state.second.has_value();
  if (!had_second) state.second.emplace();
  auto& second = *state.second;
  const bool all_made_it = most.made == -most.minus_made;
  const auto counts = static_cast<int64_t>(all_made_it ? most.made : most.sealed);
  if (has_none) {
    second.sealed = counts;
  } else if (counts > second.sealed) {
    state.seal(counts);
  }
  second.made = second.sealed;
  second.tries = static_cast<int64_t>(most.tries) + 1;
  second.grows = most.comes != 0;
  if (most.has_written != 0) second.before.reset();
  const bool has_come_since = most.has_before != 0 && most.has_written == 0 && !second.before;
  if (has_come_since) second.before.emplace();
  if (second.former) return;
  const torch::NoGradGuard no_grad;
  if (!had_second) {
    second.former = state.shared_estate(param_groups_);
    return;
  }
  // What programs have written since the last step, as all of them do.
  bool has_written = false;
  for (const auto& module : state.modules) {
    has_written = has_written || module->is_written();
    module->adopt_alone();
  }
  second.former.emplace(state.shards());
  second.former->set_written(has_written);
}

// In the group that has been followed, with modules whose values are not there yet.
void ShardedOptimizerCore::take_over_from_owners(int64_t step) {
  auto& state = this->state();
  auto& second = *state.second;
  auto& module = *state.modules.front();
  const bool goes_on = state.group.size() > 1 && !module.shared();
  if (goes_on) module.hold_second();
  state.local = make_local(state.make, state.shares_of(param_groups_), *defaults_, state.name);
  state.steps = step;
  const auto wanted = state.shards();
  second.former->fill(state.group, wanted, *state.local, second.before ? &*second.before : nullptr);
  state.for_pieces([](ShardedModule&, OwnedPiece& piece) { piece.put_out(); });
  if (goes_on) {
    state.publish_second();
    second.updated = state.shards();
    second.made = second.tries;
    state.group.barrier(state.label("the new shards")).wait();
    state.seal(second.made);
    return;
  }
  std::unique_ptr<GuardedUpdate> made;
  if (state.group.size() > 1) {
    made = std::make_unique<GuardedUpdate>(state.group, state.shared_targets(param_groups_), *state.local,
                                           state.element_wise);
    made->seal();
  }
  state.guarded = std::move(made);
  state.alone.reset();
  state.second.reset();
}

}  // namespace shoal
