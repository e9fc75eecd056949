#include "engine/sharded_module.h"

#include <torch/utils.h>

#include <algorithm>

#include "memory/views.h"

namespace shoal {

ShardedModule::ShardedModule(Group shard, std::shared_ptr<Reducer> reducer,
                             std::vector<std::unique_ptr<ParameterGather>> gathers, std::shared_ptr<Timers> waits,
                             std::span<const at::Tensor> originals)
    : shard_(std::move(shard)), reducer_(std::move(reducer)), gathers_(std::move(gathers)), waits_(std::move(waits)) {
  list_pieces(originals);
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
      const auto& parameter = reducer_->gradients()[bucket.members()[slice.piece]].parameter;
      const auto elements = gathers_[number]->elements(slice);
      const bool narrow = parameter.element_size() < static_cast<int64_t>(sizeof(float));
      OwnedPiece piece{.gradient = bucket.members()[slice.piece],
                       .main = (narrow ? elements.to(at::kFloat) : elements).detach(),
                       .copied = narrow,
                       .outgoing = gathers_[number]->outgoing(slice),
                       .sum = bucket.kept().narrow(0, slice.in_flat.begin - kept.begin, slice.in_flat.size()),
                       .whole = slice.in_piece.size() == bucket.layout().range(slice.piece).size()};
      if (narrow && !originals.empty()) piece.main.copy_(originals[piece.gradient]);
      // A whole parameter keeps its shape: optimizers that are not element-wise look at it.
      if (piece.whole) {
        for (auto* tensor : {&piece.main, &piece.sum}) {
          *tensor = tensor->as_strided(parameter.sizes(), parameter.strides());
        }
      }
      piece.main.set_requires_grad(true);
      pieces_.push_back(std::move(piece));
    }
  }
}

void OwnedPiece::put_out() const {
  if (!outgoing.is_alias_of(main)) at::Tensor(outgoing).copy_(main.as_strided({main.numel()}, {1}));
}

void ShardedModule::publish(const Label& label) {
  first_touch_.touch_all();
  for (const auto& piece : pieces_) piece.put_out();
  std::for_each(gathers_.rbegin(), gathers_.rend(), [&](const auto& gather) { gather->publish(label); });
}

void ShardedModule::wait(const Label& label, bool at_first_touch) {
  awaited_ = label;
  for (size_t number = 0; number < gathers_.size(); ++number) {
    for (const auto& memory : gathers_[number]->awaited()) first_touch_.arm(number, memory);
  }
  if (!at_first_touch) first_touch_.touch_all();
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
      for (const auto& slice : bucket.layout().overlapping(reducer_->exchange().kept(bucket, rank))) {
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
