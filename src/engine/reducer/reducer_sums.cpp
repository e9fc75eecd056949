// Reduced buckets: delivered or held back, and their memory.

#include <torch/utils.h>

#include <cmath>
#include <utility>

#include "engine/reducer/reducer.h"

namespace shoal {

void Reducer::deliver_all(double weight) {
  if (buckets_.trailer().defined()) {
    buckets_.trailer().read(step_->used_anywhere, step_->came_anywhere);
    last_.same_on_all = buckets_.trailer().same_on_all(group_.size());
  }
  for (size_t i = 0; i < buckets_.size(); ++i) delivery_.deliver(*step_, i, weight);
  accumulated_.end_graphs(/*local=*/false);
}

// Frees the memory of reduced buckets, oldest first: their gradients were delivered or consumed. all: waits for every
// bucket. take_back() returns a bucket once, so that a consumer that throws does not see it again.
void Reducer::release_finished(bool all) {
  if (reduction_->plan().everywhere() && !step_->early) return;
  while (const auto index = step_->schedule.take_back(all)) {
    auto& sum = step_->schedule.sums()[*index];
    complete(sum);
    if (step_->early) take_early(*index);
    if (callbacks.after_sum && sum.next_stage) sum = std::exchange(sum.next_stage, {})();
    if (!buckets_[*index].transient() || buckets_.all_frozen(*index)) continue;
    buckets_.release(*index);
    // Gradients of a bucket may arrive before the last one of the bucket before. Where ranks share memory, that
    // bucket's memory is worth keeping for the next time.
    buckets_.limit_spare(step_->schedule.most_spare(step_->early || group_.transport() == "host"));
  }
}

// Fresh pages cost a rank more than a short wait for the bucket before, whose memory it can use again. Between ranks of
// one pace that wait is short; else it lasts at most as long as the pages would take.
void Reducer::reuse_memory(size_t gradient) {
  if (step_->early || !buckets_.needs_fresh_memory(gradient) || group_.transport() != "host") return;
  release_finished();
  if (!buckets_.needs_fresh_memory(gradient)) return;
  constexpr int64_t fresh_microseconds_per_mebibyte = 750;
  const auto& bucket = buckets_.of(gradient);
  const auto bytes = bucket.numel() * static_cast<int64_t>(bucket.options().dtype().itemsize());
  step_->schedule.await_oldest(std::chrono::microseconds((bytes * fresh_microseconds_per_mebibyte) >> 20));
  release_finished();
}

// A bucket issued before some rank abandoned the step has a weight, on all ranks, so that all of them take it.
void Reducer::take_early(size_t index) {
  const auto& bucket = buckets_[index];
  const double weight = bucket.sparse() ? step_->sparse[index]->weight : bucket.trailer().weight();
  if (std::isnan(weight)) {
    step_->abandoned = true;
    return;
  }
  delivery_.deliver(*step_, index, weight);
  consumed_->take(index);
}

// A step that is held back has no second stage; the next step adds what was held before its second stage.
PendingExchange Reducer::with_held(size_t index, PendingExchange sum) {
  if (!reduction_->plan().two_stages) return sum;
  if (entry_.holding) {
    sum.next_stage = {};
  } else if (auto held = accumulated_.sums().take_held(index); held.defined()) {
    sum.finish = [first = std::move(sum.finish), kept = buckets_[index].kept(), held = std::move(held)] {
      if (first) first();
      at::Tensor(kept).add_(held);
    };
  }
  return sum;
}

void Reducer::hold_back() {
  std::vector<bool> used(gradients_.size());
  buckets_.trailer().read(used, step_->came_anywhere);
  release_finished();
  for (size_t i = 0; i < buckets_.size(); ++i) {
    buckets_.drop_gradients(i);
    accumulated_.sums().hold(i, used);
  }
}

}  // namespace shoal
