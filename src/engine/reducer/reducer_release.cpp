// Buckets that have memory only while they are needed: when it goes, and who uses the means before.

#include <torch/utils.h>

#include <algorithm>
#include <cmath>
#include <thread>

#include "engine/reducer/reducer.h"
#include "memory/views.h"

namespace shoal {

// Gives up the memory of buckets that have gone, oldest first. Their gradients are elsewhere now, or used up. A rank
// that runs ahead of its peers waits for them, so that memory stays bounded. `all`: waits for every one.
void Reducer::release_finished(bool all) {
  if (exchange_->everywhere() && !early_) return;
  // While those travel, one more fills, which takes the memory of one that has come back.
  const size_t most_spare = options_.buckets_in_flight + (early_ ? 1 : 0);
  size_t in_flight = 0;
  for (size_t i = finished_; i < next_; ++i) in_flight += buckets_[i].passes() && !rests(i) ? 1 : 0;
  while (finished_ < next_) {
    auto& work = sums_[finished_].work;
    if (!all && !work.done() && (in_flight <= options_.buckets_in_flight || !comes_in_time(work))) return;
    sums_[finished_].complete();     // also lets go of the memory
    const auto index = finished_++;  // a consumer that throws does not see it again
    if (early_) take_early(index);
    if (!buckets_[index].passes() || rests(index)) continue;
    release(index);
    --in_flight;
    spare_.shrink(most_spare - std::min(in_flight, most_spare));
  }
}

void Reducer::release(size_t index) {
  drop_gradients(index);
  buckets_[index].release(spare_, keeps_passing_);
}

// Those that lie in the bucket; a stand-in, or one that nobody has used, stays.
void Reducer::drop_gradients(size_t index) {
  const auto& flat = buckets_[index].flat();
  for (const auto member : buckets_[index].members()) {
    auto& grad = gradients_[member].parameter.mutable_grad();
    if (same_storage(grad, flat)) grad.reset();
  }
}

bool Reducer::comes_in_time(Work& work) {
  if (!options_.patience) return true;  // whoever waits for it will wait
  const auto until = std::chrono::steady_clock::now() + *options_.patience;
  while (patient_ && !work.done()) {
    patient_ = std::chrono::steady_clock::now() < until;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return work.done();
}

// Whether a bucket that has come back says all about its mean: its weight rides in it, in a dtype that can hold it.
bool Reducer::knows_means_early() const {
  const auto exact = [](const Gradient& gradient) {
    return gradient.sparse || c10::elementSize(gradient.dtype()) >= 4;
  };
  return !facts_.defined() && std::all_of(gradients_.begin(), gradients_.end(), exact);
}

// A bucket that left before some rank gave the step up has a weight, on all ranks: they all take it.
void Reducer::take_early(size_t index) {
  const auto& bucket = buckets_[index];
  const double weight = bucket.sparse() ? sparse_[index]->weight : bucket.facts().weight();
  if (std::isnan(weight)) {
    void_ = true;
    return;
  }
  deliver(index, weight);
  take(index);
}

// Where means were known only at the end.
void Reducer::take_all() {
  std::vector<at::Tensor> gradients;
  for (const auto& gradient : gradients_) {
    if (gradient.parameter.grad().defined()) gradients.push_back(gradient.parameter.grad());
  }
  options_.consumer->see_all(gradients);
  gradients.clear();
  for (size_t i = 0; i < buckets_.size(); ++i) {
    take(i);
    if (buckets_[i].passes()) release(i);
  }
}

void Reducer::take(size_t index) {
  options_.consumer->take(parameters_of(buckets_[index]));
  for (const auto member : buckets_[index].members()) gradients_[member].parameter.mutable_grad().reset();
}

// Not before backward has ended: what comes once more is told otherwise.
void Reducer::leave_spent() {
  for (size_t i = 0; i < gradients_.size(); ++i) {
    if (used_anywhere_[i]) spent_->leave(i);
  }
}

}  // namespace shoal
