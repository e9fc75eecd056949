// Parameters that the program has changed since the last step: adopted, or shown as they are.

#include <fmt/format.h>
#include <torch/utils.h>

#include <algorithm>

#include "engine/changes/changed_values.h"
#include "engine/changes/separate_memory.h"
#include "engine/sharded/sharded_module.h"
#include "memory/views.h"
#include "shoal/error.h"

namespace shoal {

at::Tensor current_values(const ParameterGather& gather, const Slice& slice, const at::Tensor& main,
                          const FormerValues& former) {
  const torch::NoGradGuard no_grad;
  const auto changed = gather.changed();
  if (std::find(changed.begin(), changed.end(), slice.piece) == changed.end()) return main.detach();
  const auto now = gather.current(slice);
  auto values = main.detach().clone();
  const auto flat = in_memory_order(values);
  const auto own = gather.elements(slice).scalar_type();
  if (main.scalar_type() != own && now.scalar_type() == own) {
    former.show(now, flat, gather.replaced(slice.piece));
  } else {
    flat.copy_(now);
  }
  return values;
}

void ShardedModule::require_kinds() const {
  known_.require_no_other();
  const auto check = [&](const Known& known, bool any_kind) {
    for (size_t i = 0; i < known.names.size(); ++i) {
      const auto& watch = known.watch;
      const bool kind = !any_kind && watch.other_kind(i) && !(converts_ && watch.other_floating_dtype(i));
      const bool unfrozen = watch.trainable_changed(i) && watch.parameters()[i].requires_grad();
      if (!kind && !unfrozen) continue;
      throw UsageError(
          fmt::format("parameter {} has changed in a way that its shards do not support: {}. Revert the change ({}), "
                      "or wrap the module again with a new optimizer",
                      known.names[i], watch.describe(i), kind ? "module.to(dtype)" : "requires_grad_(false)"));
    }
  };
  check(trainable_, false);
  for (const auto& frozen : frozen_) check(frozen, false);
  check(replicated_, true);
}

bool ShardedModule::any_other_dtype() const {
  const auto any = [](const Known& known) {
    for (size_t i = 0; i < known.names.size(); ++i) {
      if (known.watch.other_floating_dtype(i)) return true;
    }
    return false;
  };
  return any(trainable_) || std::any_of(frozen_.begin(), frozen_.end(), any);
}

bool ShardedModule::changed() const {
  const auto any = [](const auto& gather) { return !gather->changed().empty(); };
  return std::any_of(gathers_.begin(), gathers_.end(), any) || replicated_.watch.changed() ||
         std::any_of(frozen_.begin(), frozen_.end(), [&](const Known& frozen) { return any(frozen.gather); });
}

bool ShardedModule::changed_for_good() {
  if (!changed()) return false;
  wait_all();
  visit_gathers([](const std::string&, ParameterGather& gather) { gather.forget_undone(); });
  return changed();
}

// Their homes may have moved since they were wrapped.
void ShardedModule::separate_replaced() {
  std::vector<NamedTensor> all;
  std::vector<at::Tensor> replaced;
  const auto add = [&](const Known& known, size_t number, bool is_replaced) {
    const auto& parameter = known.watch.parameters()[number];
    all.push_back({.name = known.names[number], .aliases = {}, .tensor = parameter});
    if (is_replaced) replaced.push_back(parameter);
  };
  std::vector<bool> trainable(trainable_.names.size());
  for (size_t number = 0; number < gathers_.size(); ++number) {
    const auto& members = reducer_->buckets()[number].members();
    for (size_t piece = 0; piece < members.size(); ++piece) {
      trainable[members[piece]] = gathers_[number]->replaced(piece);
    }
  }
  for (size_t i = 0; i < trainable.size(); ++i) add(trainable_, i, trainable[i]);
  for (const auto& frozen : frozen_) {
    for (size_t i = 0; i < frozen.names.size(); ++i) add(frozen, i, frozen.gather->replaced(i));
  }
  for (size_t i = 0; i < replicated_.names.size(); ++i) add(replicated_, i, replicated_.watch.replaced(i));
  if (!replaced.empty()) separate(all, replaced, known_.owner().empty() ? "FullyShardedDataParallel" : known_.owner());
}

std::optional<ShardedModule::Changes> ShardedModule::agreed_changes() {
  require_going_on();
  require_kinds();
  if (!changed()) return std::nullopt;
  const torch::NoGradGuard no_grad;
  wait_all();
  std::vector<ChangedValue> values;
  Changes changes;
  for (size_t number = 0; number < gathers_.size(); ++number) {
    const auto& members = reducer_->buckets()[number].members();
    for (const auto piece : changes.trainable.emplace_back(gathers_[number]->changed())) {
      values.push_back({reducer_->gradients()[members[piece]].name, gathers_[number]->digest(piece)});
    }
  }
  for (const auto& frozen : frozen_) {
    for (const auto piece : changes.frozen.emplace_back(frozen.gather->changed())) {
      values.push_back({frozen.names[piece], frozen.gather->digest(piece), /*frozen=*/true});
    }
  }
  for (size_t i = 0; i < replicated_.names.size(); ++i) {
    if (!replicated_.watch.changed(i)) continue;
    const auto& parameter = replicated_.watch.parameters()[i];
    values.push_back({replicated_.names[i], digest_of(parameter), /*frozen=*/!parameter.requires_grad()});
  }
  agree_on_values(reducer_->group(), values);
  return changes;
}

void ShardedModule::agree_on_changes(const Label& label) {
  const auto other_strides = [](const Known& known) {
    const auto& parameters = known.watch.parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (parameters[i].strides() != known.watch.strides(i)) return true;
    }
    return false;
  };
  require_going_on();
  require_kinds();
  if (!changed_for_good()) return;
  const bool here = other_strides(trainable_) || std::any_of(frozen_.begin(), frozen_.end(), other_strides);
  const bool anywhere = reducer_->group().all_reduce(here ? 1.0 : 0.0, ReduceOp::max, label) > 0;
  if (anywhere) {
    adopt_changes(label);
  } else {
    agreed_changes();
  }
}

void ShardedModule::adopt_changes(const Label& label) {
  require_going_on();
  require_kinds();
  if (changed_for_good()) {
    separate_replaced();
    visit_gathers([](const std::string&, ParameterGather& gather) { gather.leave_to_holders(); });
  }
  const auto changes = agreed_changes();
  if (!changes) return;
  const torch::NoGradGuard no_grad;
  written_ = true;
  const auto copies = take_other_dtypes(*changes);
  for (size_t number = 0; number < gathers_.size(); ++number) {
    if (!changes->trainable[number].empty()) gathers_[number]->adopt(label);
  }
  for (size_t number = 0; number < frozen_.size(); ++number) {
    if (!changes->frozen[number].empty()) frozen_[number].gather->adopt(label);
  }
  replicated_.watch.note();
  for (auto& piece : pieces_) piece.move_to(gathers_[piece.bucket]->elements(piece.slice));
  for (const auto& copy : copies) copy.take();
}

void ShardedModule::adopt_alone() {
  if (!changed()) return;
  const torch::NoGradGuard no_grad;
  written_ = true;
  Changes changes;
  for (const auto& gather : gathers_) changes.trainable.push_back(gather->changed());
  for (const auto& frozen : frozen_) changes.frozen.push_back(frozen.gather->changed());
  const auto copies = take_other_dtypes(changes);
  visit_gathers([](const std::string&, ParameterGather& gather) { gather.adopt_alone(); });
  replicated_.watch.note();
  for (const auto& copy : copies) copy.take();
}

at::Tensor ShardedModule::current(const OwnedPiece& piece) const {
  return current_values(*gathers_[piece.bucket], piece.slice, piece.main, piece.former);
}

// A write is noticed of a whole parameter or page, most of which may be as it was, and a load may give a parameter what
// its copy rounds to.
std::vector<ShardedModule::OutdatedCopy> ShardedModule::take_other_dtypes(const Changes& changes) {
  std::vector<OutdatedCopy> others;
  const auto add = [&](const ParameterWatch& watch, size_t number, const ParameterGather& gather, const Slice& slice,
                       const at::Tensor& elements, const at::Tensor& exact, const FormerValues& former) {
    if (!watch.other_floating_dtype(number)) {
      others.push_back({elements, exact, former, gather.replaced(slice.piece)});
      return;
    }
    const auto& parameter = watch.parameters()[number];
    auto values = at::empty_strided(parameter.sizes(), watch.strides(number), parameter.options().requires_grad(false));
    former.give(in_memory_order(values.copy_(parameter)).narrow(0, slice.in_piece.begin, slice.in_piece.size()), exact);
  };
  const auto holds = [](const std::vector<size_t>& list, size_t piece) {
    return std::find(list.begin(), list.end(), piece) != list.end();
  };
  for (const auto* list : {&pieces_, &second_shards_.pieces}) {
    for (const auto& piece : *list) {
      if (!piece.copied || !holds(changes.trainable[piece.bucket], piece.slice.piece)) continue;
      add(trainable_.watch, piece.gradient, *gathers_[piece.bucket], piece.slice, piece.elements,
          piece.main.as_strided({piece.main.numel()}, {1}), piece.former);
    }
  }
  for (size_t number = 0; number < frozen_.size(); ++number) {
    for (const auto& piece : frozen_[number].pieces) {
      if (!piece.exact.defined() || !holds(changes.frozen[number], piece.slice.piece)) continue;
      add(frozen_[number].watch, piece.slice.piece, *frozen_[number].gather, piece.slice, piece.elements, piece.exact,
          piece.former);
    }
  }
  return others;
}

}  // namespace shoal
