// Ranges of parameters of which a rank is the second owner.

#include <torch/utils.h>

#include <algorithm>

#include "engine/sharded/early_use.h"
#include "engine/sharded/second_copies.h"
#include "engine/sharded/sharded_ranges.h"
#include "shoal/error.h"

namespace shoal {

ShardedOptimizerCore::ParamGroups ShardedOptimizerCore::State::own_twice(const ParamGroups& groups) {
  modules.front()->wait_all();
  modules.front()->hold_second();
  return shares_of(groups);
}

std::vector<at::Tensor> ShardedOptimizerCore::State::own_once() {
  auto& module = *modules.front();
  std::vector<at::Tensor> list;
  for (const auto& piece : module.second_pieces()) list.push_back(piece.main);
  module.drop_second();
  return list;
}

std::vector<Estate::Shard> ShardedOptimizerCore::State::shards() const {
  std::vector<Estate::Shard> list;
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

void ShardedOptimizerCore::State::complete_second() {
  prepare_gradients();
  SecondQuestion question{.options = commit.options, .updates = steps};
  add_own_state(question);
  for (const auto& module : modules) module->complete_second(question);
}

void ShardedOptimizerCore::State::end_outdated() {
  for (const auto& module : modules) module->end_outdated();
}

// Also of ranks that have left this update out, which the next commit says: so its label has the number of reductions.
void ShardedOptimizerCore::State::publish_second() {
  if (!second) return;
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
  if (!second) return;
  for_pieces([](const ShardedModule&, OwnedPiece& piece) { piece.sealed = piece.sum._version(); });
}

void ShardedOptimizerCore::State::require_sealed() const {
  if (!second) return;
  for_pieces([](const ShardedModule&, const OwnedPiece& piece) {
    if (piece.sealed != piece.sum._version()) throw UsageError(GuardedUpdate::late_change);
  });
}

}  // namespace shoal
