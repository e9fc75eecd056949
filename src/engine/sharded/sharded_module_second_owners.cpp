// Pieces of a sharded module of which a rank is the second owner.

#include <torch/utils.h>

#include <algorithm>
#include <utility>

#include "engine/gradients/gradient_norm.h"
#include "engine/sharded/second_copies.h"
#include "engine/sharded/sharded_module.h"

namespace shoal {

bool ShardedModule::has_pages() const {
  return std::any_of(gathers_.begin(), gathers_.end(), [](const auto& gather) { return gather->pager() != nullptr; });
}

void ShardedModule::enable_second_owners() {
  const torch::NoGradGuard no_grad;
  second_shards_.copies = std::make_shared<SecondCopies>(*reducer_);
  drop_former();  // second owners have none
  for (size_t number = 0; number < gathers_.size(); ++number) {
    std::vector<Range> ranges;
    for (const auto& copy : second_shards_.copies->of(number)) ranges.push_back(copy.range);
    gathers_[number]->hold(std::move(ranges));
    for (const auto& copy : second_shards_.copies->of(number)) {
      for (const auto& slice : reducer_->buckets()[number].layout().overlapping(copy.range)) {
        second_shards_.pieces.push_back(piece_of(number, slice, copy.sum, copy.range.begin));
        second_shards_.pieces.back().owner = copy.owner;
        second_shards_.pieces.back().counted = false;
      }
    }
  }
  reducer_->callbacks.after_sum = [copies = second_shards_.copies](PendingExchange sum, size_t bucket,
                                                                   const Label& label) {
    return copies->follow(std::move(sum), bucket, label);
  };
}

void ShardedModule::disable_second_owners() {
  reducer_->callbacks.after_sum = {};
  second_shards_.pieces.clear();
  second_shards_.copies.reset();
  for (const auto& gather : gathers_) gather->hold({});
}

void ShardedModule::complete_second_sums(SecondOwnerCheck check) {
  for (const auto* list : {&pieces_, &second_shards_.pieces}) {
    for (const auto& piece : *list) check.add_element(piece.owner < 0 ? shard_.rank() : piece.owner, piece.main);
  }
  second_shards_.copies->complete(std::move(check));
}

void ShardedModule::clip_sums(std::vector<at::Tensor> sums, double norm, double max_norm) {
  if (!second_shards_.copies) return clip_to_norm(sums, norm, max_norm);
  for (const auto& piece : second_shards_.pieces) {
    if (reducer_->sums().has_part(piece.gradient)) sums.push_back(piece.sum);
  }
  second_shards_.copies->change_alike([&] { clip_to_norm(sums, norm, max_norm); });
}

}  // namespace shoal
