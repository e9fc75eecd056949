#include "engine/checkpoint/sharded.h"

#include <torch/utils.h>

#include "checkpoint/on_all_ranks.h"
#include "engine/checkpoint/reducers.h"

namespace shoal {

void ShardedSource::adopt_changes() {
  state_.require_known(optimizer_);
  for (const auto& module : modules()) module->require_kinds();
  for (const auto& module : modules()) module->adopt_changes(state_.label("replaced parameters"));
}

void ShardedSource::begin_save() {
  state_.require_known(optimizer_);
  for (const auto& module : modules()) module->require_kinds();
  for (const auto& module : modules()) module->agree_on_changes(state_.label("replaced parameters"));
}

CheckpointView ShardedSource::view() {
  CheckpointView view;
  view.shares.push_back({.pieces = state_.state_pieces(), .rank = state_.group.rank(), .local = state_.local.get()});
  view.optimizers = {&optimizer_};
  view.scaler = state_.scaler ? &*state_.scaler : nullptr;
  add_others(view);
  return view;
}

std::vector<Reducer*> ShardedSource::reducers() const {
  std::vector<Reducer*> list;
  for (const auto& module : state_.modules) list.push_back(&module->reducer());
  return list;
}

CarriedStates ShardedSource::carried() {
  return {.own = carried_by(reducers()), .common = {}};
}

void ShardedSource::begin_load(const CarriedStates& past) {
  const torch::NoGradGuard no_grad;
  on_all_ranks(group(), "checkpoint", [&] {
    for (const auto& module : modules()) module->reducer().require_none_local("a load");
  });
  for (const auto& module : modules()) {
    module->wait_all();
    // Loaded parameters may be sent from the memory of the sums, and a loaded scaler has another scale.
    module->reducer().sums().spoil(
        "is from before a checkpoint was loaded: drop it with zero_grad() before the next backward or step()");
  }
  CheckpointSource::begin_load(past);
}

void ShardedSource::end_load(const CarriedStates& past) {
  const torch::NoGradGuard no_grad;
  const auto label = state_.label("loaded parameters");
  const auto all = modules();
  for (const auto& module : all) module->publish(label);
  for (const auto& module : all) module->wait(label, /*at_first_touch=*/false);
  differences_ = resume_from(group(), reducers(), past.own);
}

}  // namespace shoal
