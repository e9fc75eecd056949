// Sharded optimizers by ranges, in jobs with second owners.

#include <torch/utils.h>

#include <algorithm>

#include "engine/sharded/early_use.h"
#include "engine/sharded/second_owner_check.h"
#include "engine/sharded/sharded_ranges.h"
#include "shoal/error.h"

namespace shoal {

ShardedOptimizerCore::ParamGroups ShardedOptimizerCore::State::enable_second_owners(const ParamGroups& groups) {
  modules.front()->wait_all();
  modules.front()->enable_second_owners();
  return shares_of(groups);
}

std::vector<at::Tensor> ShardedOptimizerCore::State::disable_second_owners() {
  auto& module = *modules.front();
  std::vector<at::Tensor> list;
  for (const auto& piece : module.second_pieces()) list.push_back(piece.main);
  module.disable_second_owners();
  return list;
}

std::vector<ShardSource::Shard> ShardedOptimizerCore::State::shards() const {
  std::vector<ShardSource::Shard> list;
  for_pieces([&](const ShardedModule& module, const OwnedPiece& piece) {
    const auto& gradient = module.reducer().gradients()[piece.gradient];
    list.push_back({gradient.name,
                    {.values = piece.main, .parameter = gradient.parameter, .range = piece.slice.in_piece},
                    state_of(*local, piece.main),
                    piece.owner < 0 ? group.rank() : piece.owner});
  });
  return list;
}

ShardedOptimizerBase::State::ShardNames ShardedOptimizerCore::State::shard_names() const {
  ShardNames names;
  for (const auto& gradient : modules.front()->reducer().gradients()) {
    names[gradient.parameter.unsafeGetTensorImpl()] = gradient.name;
  }
  return names;
}

void ShardedOptimizerCore::State::take_filled() {
  for_pieces([](ShardedModule&, OwnedPiece& piece) { piece.put_out(); });
}

bool ShardedOptimizerCore::State::is_written() const {
  return std::any_of(modules.begin(), modules.end(), [](const auto& module) { return module->is_written(); });
}

void ShardedOptimizerCore::State::adopt_alone() {
  for (const auto& module : modules) module->adopt_alone();
}

void ShardedOptimizerCore::State::check_second_owners() {
  prepare_gradients();
  SecondOwnerCheck check{.options = commit.options, .updates = steps};
  add_own_state(check);
  for (const auto& module : modules) module->complete_second_sums(check);
}

void ShardedOptimizerCore::State::end_outdated() {
  for (const auto& module : modules) module->end_outdated();
}

// Also of ranks that have left this update out, which the next commit says: so its label has the number of reductions.
void ShardedOptimizerCore::State::publish_deferred_update() {
  if (!second_owners) return;
  const torch::NoGradGuard no_grad;
  for (const auto& module : modules) module->publish_now({module->reducer().step(), -1, "updated parameters"});
  if (modules.front()->has_pages()) return;
  std::string early_use;  // by this rank alone, perhaps
  for (const auto& module : modules) {
    const auto error = module->take_early_use();
    if (early_use.empty()) early_use = error;
  }
  // No rank goes on, and writes parameters between steps, before all have them: in a division, those of all are as they
  // were sent.
  meet_without_early_use(group, early_use,
                         {modules.front()->reducer().step(), -1, "whether all have the updated parameters"});
}

void ShardedOptimizerCore::State::seal_gradients() {
  if (!second_owners) return;
  for_pieces([](const ShardedModule&, OwnedPiece& piece) { piece.sealed = piece.sum._version(); });
}

void ShardedOptimizerCore::State::require_sealed() const {
  if (!second_owners) return;
  for_pieces([](const ShardedModule&, const OwnedPiece& piece) {
    if (piece.sealed != piece.sum._version()) throw UsageError(GuardedUpdate::late_change);
  });
}

}  // namespace shoal
