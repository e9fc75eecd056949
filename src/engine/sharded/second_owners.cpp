// Sharded optimizers by range in elastic jobs whose ranks share no memory: every share has a second owner, which makes the same
// updates. So a rank that has all gradients can finish its step alone, and no rank's end takes a share along.

#include <fmt/format.h>
#include <torch/utils.h>

#include <algorithm>
#include <utility>

#include "engine/sharded/sharded_ranges.h"
#include "optim/param_groups.h"
#include "shoal/error.h"

namespace shoal {
namespace {

bool same(const NamedState& a, const NamedState& b) {
  if (a.tensors.size() != b.tensors.size()) return false;
  return std::all_of(a.tensors.begin(), a.tensors.end(), [&](const auto& entry) {
    const auto other = b.tensors.find(entry.first);
    return other != b.tensors.end() && other->second.const_data_ptr() == entry.second.const_data_ptr() &&
           other->second.scalar_type() == entry.second.scalar_type() && other->second.sizes() == entry.second.sizes();
  });
}

}  // namespace

Estate ShardedOptimizerCore::State::estate() const {
  std::vector<Estate::Shard> shards;
  for_pieces([&](const ShardedModule& module, const OwnedPiece& piece) {
    const auto& gradient = module.reducer().gradients()[piece.gradient];
    shards.push_back(
        {gradient.name, {.values = piece.main, .parameter = gradient.parameter, .range = piece.slice.in_piece}});
  });
  return {std::move(shards), local};
}

void ShardedOptimizerCore::State::complete_second() {
  const auto present = estate().states();
  bool unchanged = present.size() == second->updated.size();
  for (size_t i = 0; unchanged && i < present.size(); ++i) unchanged = same(present[i], second->updated[i]);
  if (!unchanged) {
    throw UsageError(
        "Elastic: the state of the sharded optimizer was loaded or replaced, which is not supported here: load it "
        "before "
        "Elastic is constructed");
  }
  prepare_gradients();
  for (const auto& module : modules) module->complete_second(commit.options, label("second copies of gradients"));
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
  if (state.group.size() == 1 || !module.has_pages()) return ShardedOptimizerBase::guard();
  if (state.second) return;
  const torch::NoGradGuard no_grad;
  module.wait_all();
  const auto former = state.estate();
  module.hold_second();
  auto local = make_local(state.make, state.shares_of(param_groups_), *defaults_, state.name);
  copy_options(state.local->param_groups(), local->param_groups());
  state.local = std::move(local);
  state.second.emplace();
  const auto present = state.estate();
  former.fill(state.group, present);
  state.second->updated = present.states();
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

// A division counts if some rank knows that all have made it, or if all that are left have. Then all of them have it here.
void ShardedOptimizerCore::begin_regroup(const Group& group) {
  auto& state = this->state();
  if (!state.second) return;
  auto& second = *state.second;
  const std::vector<int64_t> own{second.sealed, second.made, -second.made, second.tries};
  const auto most =
      group.all_reduce(std::vector<double>(own.begin(), own.end()), ReduceOp::max, state.label("whose shards count"));
  const auto made = static_cast<int64_t>(most[1]);
  const auto counts = most[1] == -most[2] ? made : static_cast<int64_t>(most[0]);
  if (counts > second.sealed) {
    second.sealed = counts;
    second.former.reset();
  }
  second.made = second.sealed;
  second.tries = static_cast<int64_t>(most[3]) + 1;
  if (second.former) return;
  // What programs have written since the last step, as all of them do.
  bool written = false;
  for (const auto& module : state.modules) {
    written = written || module->is_written();
    module->adopt_alone();
  }
  second.former = state.estate();
  second.former->set_written(written);
}

// In the group that has been followed, with modules whose values are not there yet.
void ShardedOptimizerCore::take_over_from_owners(int64_t step) {
  auto& state = this->state();
  auto& second = *state.second;
  auto& module = *state.modules.front();
  const bool goes_on = state.group.size() > 1 && module.has_pages();
  if (goes_on) module.hold_second();
  state.local = make_local(state.make, state.shares_of(param_groups_), *defaults_, state.name);
  state.steps = step;
  state.wait_at_first_touch = module.has_pages();
  const auto present = state.estate();
  second.former->fill(state.group, present);
  state.for_pieces([](ShardedModule&, OwnedPiece& piece) { piece.put_out(); });
  if (goes_on) {
    second.updated = present.states();
    second.made = second.tries;
    state.group.barrier(state.label("the new shards")).wait();
    second.sealed = second.made;
    second.former.reset();
  } else {
    if (state.group.size() > 1) {
      auto made = std::make_unique<GuardedUpdate>(state.group, state.shared_targets(param_groups_), *state.local,
                                                  state.element_wise);
      made->seal();
      state.guarded = std::move(made);
    }
    state.second.reset();
  }
}

}  // namespace shoal
