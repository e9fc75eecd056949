#include "engine/sharded/sharded_module.h"

#include <fmt/format.h>
#include <torch/utils.h>

#include <algorithm>

#include "engine/sharded/changed_values.h"
#include "memory/views.h"
#include "shoal/error.h"

namespace shoal {

// Part by part, because what is compared takes memory, too.
void take_written(const at::Tensor& elements, const at::Tensor& copy) {
  constexpr int64_t at_once = int64_t{1} << 20;
  const auto divided = [](const at::Tensor& tensor) {
    return (tensor.dim() == 0 ? tensor.unsqueeze(0) : tensor).split(at_once);
  };
  const auto exact = divided(copy.detach());
  const auto now = divided(elements);
  for (size_t i = 0; i < exact.size(); ++i) {
    const auto written = now[i] != exact[i].to(now[i].scalar_type());
    exact[i].copy_(at::where(written, now[i].to(exact[i].scalar_type()), exact[i]));
  }
}

ShardedModule::ShardedModule(Group shard, std::shared_ptr<Reducer> reducer,
                             std::vector<std::unique_ptr<ParameterGather>> gathers, std::shared_ptr<Timers> waits,
                             std::span<const at::Tensor> originals)
    : shard_(std::move(shard)), reducer_(std::move(reducer)), gathers_(std::move(gathers)), waits_(std::move(waits)) {
  list_pieces(originals);
  std::vector<at::Tensor> parameters;
  for (const auto& gradient : reducer_->gradients()) {
    trainable_.names.push_back(gradient.name);
    parameters.push_back(gradient.parameter);
  }
  trainable_.watch = ParameterWatch(std::move(parameters));
}

ShardedModule::~ShardedModule() {
  try {
    first_touch_.touch_all();
  } catch (...) {  // NOLINT(bugprone-empty-catch): a peer is gone; whoever calls the group next is told
  }
}

void ShardedModule::list_pieces(std::span<const at::Tensor> originals) {
  const torch::NoGradGuard no_grad;
  for (size_t number = 0; number < gathers_.size(); ++number) {
    const auto& bucket = reducer_->buckets()[number];
    const auto& kept = bucket.kept_range();
    for (const auto& slice : bucket.layout().overlapping(kept)) {
      auto& piece = pieces_.emplace_back(piece_of(number, slice, bucket.kept(), kept.begin));
      if (!piece.copied || originals.empty()) continue;
      piece.main.detach().as_strided({piece.main.numel()}, {1}).copy_(originals[piece.gradient]);
    }
  }
}

OwnedPiece ShardedModule::piece_of(size_t number, const Slice& slice, const at::Tensor& sums, int64_t begin) const {
  const auto& bucket = reducer_->buckets()[number];
  const auto& parameter = reducer_->gradients()[bucket.members()[slice.piece]].parameter;
  const auto elements = gathers_[number]->elements(slice);
  const bool narrow = has_copy(parameter);
  OwnedPiece piece{.gradient = bucket.members()[slice.piece],
                   .main = (narrow ? elements.to(at::kFloat) : elements).detach(),
                   .copied = narrow,
                   .outgoing = gathers_[number]->outgoing(slice),
                   .sum = sums.narrow(0, slice.in_flat.begin - begin, slice.in_flat.size()),
                   .whole = slice.in_piece.size() == bucket.layout().range(slice.piece).size(),
                   .elements = elements,
                   .bucket = number,
                   .slice = slice};
  // A whole parameter keeps its shape: optimizers that are not element-wise look at it.
  if (piece.whole) {
    for (auto* tensor : {&piece.main, &piece.sum}) *tensor = tensor->as_strided(parameter.sizes(), parameter.strides());
  }
  piece.main.set_requires_grad(true);
  return piece;
}

void OwnedPiece::put_out() const {
  if (!outgoing.is_alias_of(main)) at::Tensor(outgoing).copy_(main.as_strided({main.numel()}, {1}));
}

void OwnedPiece::take_back() const {
  if (copied) take_written(outgoing, main.as_strided({main.numel()}, {1}));
}

void FrozenPiece::take_back() const {
  if (exact.defined()) take_written(elements, exact);
}

bool ShardedModule::shared() const {
  return std::any_of(gathers_.begin(), gathers_.end(), [](const auto& gather) { return gather->shared(); });
}

void ShardedModule::end() {
  wait_all();
  reducer_->drop_sums();
  reducer_->detach();
  ended_ = true;
}

void ShardedModule::require_going_on() const {
  if (ended_) {
    throw UsageError(
        "the wrapper cannot be used after unwrap(): use the module itself, or create a new wrapper and a new optimizer "
        "for it");
  }
}

void ShardedModule::require_not_lent(const char* what) const {
  if (lent_) throw UsageError(fmt::format("{} within summon_full_params(); end that scope first", what));
}

void ShardedModule::serve_readers() {
  require_going_on();
  require_not_lent("optimizer step");
  reducer_->require_seen_gradients();
  for (const auto& gather : gathers_) {
    if (auto* pager = gather->pager()) return pager->update();  // all gathers have the same one
  }
}

void ShardedModule::publish(const Label& label) {
  require_going_on();
  first_touch_.touch_all();
  for (const auto* list : {&pieces_, &second_pieces_}) {
    for (const auto& piece : *list) piece.put_out();
  }
  std::for_each(gathers_.rbegin(), gathers_.rend(), [&](const auto& gather) { gather->publish(label); });
}

void ShardedModule::wait(const Label& label, bool at_first_touch) {
  awaited_ = label;
  if (!at_first_touch || shard_.size() == 1) {
    first_touch_.touch_all();
    for (size_t number = 0; number < gathers_.size(); ++number) await(number);
    return;
  }
  for (size_t number = 0; number < gathers_.size(); ++number) {
    const auto awaited = gathers_[number]->awaited();
    const auto& members = reducer_->buckets()[number].members();
    for (size_t piece = 0; piece < awaited.size(); ++piece) {
      first_touch_.arm(
          number, awaited[piece],
          fmt::format("parameter {} may miss updates of other ranks: operators wait for them automatically; call the "
                      "optimizer's finish_param_sync() before saving them or reading their memory (data_ptr)",
                      reducer_->gradients()[members[piece]].name));
    }
  }
}

void ShardedModule::await(size_t bucket) {
  timed(waits_.get(), "params-all-gather", 1, [&] { gathers_[bucket]->wait(awaited_); });
}

void ShardedModule::add_frozen(std::vector<std::string> names, std::vector<at::Tensor> parameters,
                               std::shared_ptr<ParameterGather> gather, std::vector<FrozenPiece> pieces) {
  frozen_.push_back({std::move(names), ParameterWatch(std::move(parameters)), std::move(gather), std::move(pieces)});
}

void ShardedModule::add_replicated(std::vector<std::string> names, std::vector<at::Tensor> parameters) {
  replicated_ = {std::move(names), ParameterWatch(std::move(parameters)), nullptr};
}

void ShardedModule::notice_writes(bool on) {
  visit_gathers([&](const std::string&, ParameterGather& gather) { gather.notice_writes(on); });
}

void ShardedModule::visit_gathers(
    const std::function<void(const std::string& parameter, ParameterGather& gather)>& visit) const {
  for (size_t number = 0; number < gathers_.size(); ++number) {
    visit(reducer_->gradients()[reducer_->buckets()[number].members().front()].name, *gathers_[number]);
  }
  for (const auto& frozen : frozen_) visit(frozen.names.front(), *frozen.gather);
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

void ShardedModule::separate_replaced() {
  std::vector<NamedTensor> all;
  std::vector<at::Tensor> replaced;
  const auto add = [&](const Known& known) {
    for (size_t i = 0; i < known.names.size(); ++i) {
      const auto& parameter = known.watch.parameters()[i];
      all.push_back({.name = known.names[i], .aliases = {}, .tensor = parameter});
      if (known.watch.replaced(i)) replaced.push_back(parameter);
    }
  };
  add(trainable_);
  for (const auto& frozen : frozen_) add(frozen);
  add(replicated_);
  if (!replaced.empty()) separate(all, replaced, known_.owner());
}

void ShardedModule::adopt_changes(const Label& label) {
  require_going_on();
  require_kinds();
  if (!changed()) return;
  const torch::NoGradGuard no_grad;
  wait_all();
  separate_replaced();
  std::vector<ChangedValue> values;
  std::vector<std::vector<size_t>> changed_pieces;
  for (size_t number = 0; number < gathers_.size(); ++number) {
    const auto& members = reducer_->buckets()[number].members();
    for (const auto piece : changed_pieces.emplace_back(gathers_[number]->changed())) {
      values.push_back({reducer_->gradients()[members[piece]].name, gathers_[number]->digest(piece)});
    }
  }
  std::vector<std::vector<size_t>> changed_frozen;
  for (const auto& frozen : frozen_) {
    for (const auto piece : changed_frozen.emplace_back(frozen.gather->changed())) {
      values.push_back({frozen.names[piece], frozen.gather->digest(piece)});
    }
  }
  for (size_t i = 0; i < replicated_.names.size(); ++i) {
    if (!replicated_.watch.changed(i)) continue;
    values.push_back({replicated_.names[i], digest_of(replicated_.watch.parameters()[i])});
  }
  agree_on_values(reducer_->group(), values);
  refresh_copies(changed_pieces, changed_frozen, /*in_other_dtype=*/true);
  for (size_t number = 0; number < gathers_.size(); ++number) {
    if (!changed_pieces[number].empty()) gathers_[number]->adopt(label);
  }
  for (size_t number = 0; number < frozen_.size(); ++number) {
    if (!changed_frozen[number].empty()) frozen_[number].gather->adopt(label);
  }
  replicated_.watch.note();
  refresh_copies(changed_pieces, changed_frozen, /*in_other_dtype=*/false);
}

// The float32 copies of parameters that have other values: of those in another dtype, which may hold more than their own
// bits, while they are there; then of all. A write is noticed of a whole parameter or page, most of which may be as it
// was, and a load may give a parameter what its copy rounds to.
void ShardedModule::refresh_copies(const std::vector<std::vector<size_t>>& changed,
                                   const std::vector<std::vector<size_t>>& changed_frozen, bool in_other_dtype) {
  const auto refresh = [&](const ParameterWatch& watch, size_t number, const Slice& slice, const at::Tensor& elements,
                           const at::Tensor& exact) {
    if (!in_other_dtype) {
      take_written(elements, exact);
    } else if (watch.other_floating_dtype(number)) {
      const auto& parameter = watch.parameters()[number];
      auto values =
          at::empty_strided(parameter.sizes(), watch.strides(number), parameter.options().requires_grad(false));
      exact.detach().copy_(
          in_memory_order(values.copy_(parameter)).narrow(0, slice.in_piece.begin, slice.in_piece.size()));
    }
  };
  const auto holds = [](const std::vector<size_t>& list, size_t piece) {
    return std::find(list.begin(), list.end(), piece) != list.end();
  };
  for (const auto* list : {&pieces_, &second_pieces_}) {
    for (const auto& piece : *list) {
      if (!piece.copied || !holds(changed[piece.bucket], piece.slice.piece)) continue;
      refresh(trainable_.watch, piece.gradient, piece.slice, piece.elements,
              piece.main.as_strided({piece.main.numel()}, {1}));
    }
  }
  for (size_t number = 0; number < frozen_.size(); ++number) {
    for (const auto& piece : frozen_[number].pieces) {
      if (!piece.exact.defined() || !holds(changed_frozen[number], piece.slice.piece)) continue;
      refresh(frozen_[number].watch, piece.slice.piece, piece.slice, piece.elements, piece.exact);
    }
  }
}

std::vector<StatePiece> ShardedModule::state_pieces(const std::string& prefix) const {
  std::vector<std::vector<StatePiece>> by_gradient(reducer_->gradients().size());
  const auto add = [&](size_t gradient, const Range& range, int owner) {
    const auto& about = reducer_->gradients()[gradient];
    by_gradient[gradient].push_back(
        {.name = prefix + about.name, .parameter = about.parameter, .range = range, .owner = owner});
  };
  for (const auto& bucket : reducer_->buckets()) {
    for (int rank = 0; rank < shard_.size(); ++rank) {
      for (const auto& slice : bucket.layout().overlapping(reducer_->reduction().plan().kept(bucket, rank))) {
        add(bucket.members()[slice.piece], slice.in_piece, rank);
      }
    }
  }
  for (const auto& piece : pieces_) {
    for (auto& listed : by_gradient[piece.gradient]) {
      if (listed.owner != shard_.rank()) continue;
      listed.updated = piece.main;
      listed.main = piece.copied;
    }
  }
  std::vector<StatePiece> list;
  for (size_t gradient = 0; gradient < by_gradient.size(); ++gradient) {
    if (by_gradient[gradient].empty()) add(gradient, {}, 0);  // no elements
    for (auto& piece : by_gradient[gradient]) list.push_back(std::move(piece));
  }
  return list;
}

}  // namespace shoal
