// Shards of a module in memory that the ranks of an elastic job share.

#include <torch/utils.h>

#include <algorithm>

#include "engine/sharded/sharded_module.h"
#include "memory/views.h"

namespace shoal {
namespace {

// One-dimensional elements in the shape that the rank's optimizer sees: a whole parameter keeps its own.
at::Tensor shaped(const at::Tensor& elements, const Slice& slice, const at::Tensor& parameter) {
  if (slice.in_piece.size() != parameter.numel()) return elements;
  return elements.as_strided(parameter.sizes(), dense_strides(parameter));
}

}  // namespace

void ShardedModule::share_copies() {
  if (!copies_.empty() || shard_.size() == 1) return;
  const torch::NoGradGuard no_grad;
  std::vector<at::Tensor> copies(gathers_.size());
  for (size_t number = 0; number < gathers_.size(); ++number) {
    const auto& bucket = reducer_->buckets()[number];
    const auto parameters = reducer_->buckets().parameters_of(bucket);
    if (std::none_of(parameters.begin(), parameters.end(), has_copy)) continue;
    copies[number] = shard_
                         .allocate_host_shared(bucket.layout().size(), at::TensorOptions(at::kFloat),
                                               reducer_->buckets().owners_of(bucket, shard_.size()))
                         .tensor();
  }
  copies_ = std::move(copies);
  for (auto& piece : pieces_) {
    if (!piece.copied) continue;
    const auto& range = piece.slice.in_flat;
    const auto& parameter = reducer_->gradients()[piece.gradient].parameter;
    const auto place = shaped(copies_[piece.bucket].narrow(0, range.begin, range.size()), piece.slice, parameter);
    place.copy_(piece.main);
    piece.main.set_data(place);
  }
}

std::vector<UpdateTarget> ShardedModule::targets(int rank) const {
  std::vector<UpdateTarget> list;
  if (rank == shard_.rank()) {
    for (const auto& piece : pieces_) {
      list.push_back({.values = piece.main,
                      .parameter = reducer_->gradients()[piece.gradient].parameter,
                      .range = piece.slice.in_piece,
                      .rounded = piece.copied ? piece.outgoing : at::Tensor()});
    }
    return list;
  }
  for (size_t number = 0; number < gathers_.size(); ++number) {
    const auto& bucket = reducer_->buckets()[number];
    for (const auto& slice : bucket.layout().overlapping(reducer_->reduction().plan().kept(bucket, rank))) {
      const auto& parameter = reducer_->gradients()[bucket.members()[slice.piece]].parameter;
      const auto elements = gathers_[number]->elements(slice);
      const bool copied = has_copy(parameter);
      const auto values = copied ? copies_[number].narrow(0, slice.in_flat.begin, slice.in_flat.size()) : elements;
      list.push_back({.values = shaped(values, slice, parameter),
                      .parameter = parameter,
                      .range = slice.in_piece,
                      .rounded = copied ? elements : at::Tensor()});
    }
  }
  return list;
}

const std::vector<EarlierSums::Remains>& ShardedModule::retire() {
  if (!remains_.empty()) return remains_;
  reducer_->detach();
  for (size_t i = 0; i < reducer_->gradients().size(); ++i) {
    remains_.push_back(reducer_->sums().remains(i));
    at::Tensor(reducer_->gradients()[i].parameter).mutable_grad().reset();
  }
  return remains_;
}

void ShardedModule::resume(const std::vector<EarlierSums::Remains>& remains) {
  for (size_t i = 0; i < remains.size(); ++i) {
    reducer_->sums().leave(
        i, remains[i],
        "is that of a step before ranks of the elastic job ended, and is lost: drop it with zero_grad() "
        "before the next backward or step()");
  }
}

void ShardedModule::keep_pieces(const ShardedModule& former) {
  const torch::NoGradGuard no_grad;
  for (size_t i = 0; i < pieces_.size(); ++i) {
    const auto& kept = former.pieces_[i].main;
    if (!pieces_[i].copied) kept.set_data(pieces_[i].main.detach());
    pieces_[i].main = kept;
    pieces_[i].former = former.pieces_[i].former;
  }
}

}  // namespace shoal
