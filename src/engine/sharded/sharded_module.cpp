#include "engine/sharded/sharded_module.h"

#include <fmt/format.h>
#include <torch/utils.h>

#include <algorithm>

#include "memory/views.h"
#include "shoal/error.h"

namespace shoal {

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

void OwnedPiece::move_to(const at::Tensor& now) {
  if (now.is_alias_of(elements)) return;
  elements = now;
  if (!copied) main.set_data(now.as_strided(main.sizes(), main.strides()));
}

void OwnedPiece::take_back() const {
  if (copied) former.take(outgoing, main.as_strided({main.numel()}, {1}));
}

void FrozenPiece::take_back() const {
  if (exact.defined()) former.take(elements, exact);
}

bool ShardedModule::shared() const {
  return std::any_of(gathers_.begin(), gathers_.end(), [](const auto& gather) { return gather->shared(); });
}

void ShardedModule::end() {
  wait_all();
  reducer_->sums().drop_all();
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

void ShardedModule::put_out() const {
  for (const auto* list : {&pieces_, &second_shards_.pieces}) {
    for (const auto& piece : *list) piece.put_out();
  }
}

void ShardedModule::publish(const Label& label) {
  require_going_on();
  written_ = false;
  drop_former();
  end_outdated();
  first_touch_.touch_all();
  put_out();
  send(label);
}

void ShardedModule::send(const Label& label) {
  std::for_each(gathers_.rbegin(), gathers_.rend(), [&](const auto& gather) { gather->publish(label); });
}

void ShardedModule::drop_former() const {
  for (const auto* list : {&pieces_, &second_shards_.pieces}) {
    for (const auto& piece : *list) piece.former.drop();
  }
  for (const auto& frozen : frozen_) {
    for (const auto& piece : frozen.pieces) piece.former.drop();
  }
}

void ShardedModule::publish_later(const Label& label) {
  if (has_pages()) return publish(label);
  require_going_on();
  written_ = false;
  drop_former();
  put_out();
  second_shards_.outdated.forget_early_use();
  begin_outdated();
}

// Not a parameter that was frozen since it was wrapped: without a gradient, no rank has updated it.
void ShardedModule::begin_outdated() {
  std::vector<std::pair<std::string, at::Tensor>> outdated;
  for (size_t number = 0; number < gathers_.size(); ++number) {
    const auto awaited = gathers_[number]->awaited();
    const auto& members = reducer_->buckets()[number].members();
    for (size_t piece = 0; piece < awaited.size(); ++piece) {
      const auto& gradient = reducer_->gradients()[members[piece]];
      const bool rests = !gradient.parameter.requires_grad() &&
                         reducer_->sums().remains(members[piece]) == EarlierSums::Remains::nothing;
      if (!rests) outdated.emplace_back(gradient.name, awaited[piece]);
    }
  }
  second_shards_.outdated.begin(outdated);
}

// Also where no step has updated them: other ranks may have.
void ShardedModule::publish_now(const Label& label) {
  if (has_pages()) return;  // gathered when they are used
  end_outdated();
  try {
    send(label);
    wait(label, /*at_first_touch=*/false);
  } catch (...) {
    begin_outdated();
    throw;
  }
}

void ShardedModule::wait(const Label& label, bool at_first_touch) {
  awaited_ = label;
  if (!at_first_touch || shard_.size() == 1) {
    first_touch_.touch_all();
    for (size_t number = 0; number < gathers_.size(); ++number) await(number);
    return;
  }
  arm_first_touch();
}

void ShardedModule::arm_first_touch() {
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
      listed.current = current(piece);
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
