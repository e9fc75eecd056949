// Delivery of means, from reduced buckets to grad() or to the consumer.

#include <torch/utils.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "engine/reducer/reducer.h"
#include "memory/views.h"

namespace shoal {

void Reducer::deliver_all(double weight) {
  if (buckets_.trailer().defined()) {
    buckets_.trailer().read(step_->used_anywhere, step_->came_anywhere);
    last_.same_on_all = buckets_.trailer().same_on_all(group_.size());
  }
  for (size_t i = 0; i < buckets_.size(); ++i) deliver(i, weight);
  accumulated_.end_graphs(/*local=*/false);
}

void Reducer::deliver(size_t index, double weight) {
  auto& bucket = buckets_[index];
  if (buckets_.all_frozen(index)) return;
  if (bucket.sparse()) return deliver_sparse(index);
  if (bucket.trailer().defined()) bucket.trailer().read(step_->used_anywhere, step_->came_anywhere);
  if (bucket.kept_range().empty() && !reduction_->plan().everywhere()) return leave_parts(index);
  auto sum = bucket.kept();
  if (const auto held = accumulated_.sums().take_held(index); held.defined()) sum.add_(held);
  const double factor = group_.size() / weight;
  // A weight of zero means that no rank had a sample; the sum is zero already.
  if (factor != 1.0 && weight > 0) scale_sum(index, factor);
  if (options_.leave_grad && bucket.kept_range().size() == bucket.payload_numel()) {
    deliver_whole(index);
    return;
  }
  leave_parts(index);
}

// What earlier steps left in grad() is a mean already.
void Reducer::scale_sum(size_t index, double factor) {
  const auto& bucket = buckets_[index];
  const auto add_means = [&](double sign) {
    for (size_t place = 0; place < bucket.members().size(); ++place) {
      const auto mean = mean_in_sum(bucket.members()[place]);
      if (mean.defined()) at::Tensor(bucket.view(place)).add_(mean.is_sparse() ? mean.to_dense() : mean, sign);
    }
  };
  add_means(-1);
  bucket.kept().mul_(factor);
  add_means(1);
}

// The sum has it where grad() was in the bucket and this rank's backward did not reach it, too.
at::Tensor Reducer::mean_in_sum(size_t gradient) const {
  const auto& untouched = step_->untouched[gradient];
  return untouched.defined() && accumulated_.has_mean(gradient) ? untouched : accumulated_.mean(gradient);
}

// Restores gradients that no rank used.
void Reducer::leave_parts(size_t index) {
  for (const auto member : buckets_[index].members()) {
    if (step_->untouched[member].defined() && !step_->used_anywhere[member])
      gradients_[member].parameter.mutable_grad() = step_->untouched[member];
  }
  accumulated_.sums().leave_parts(index, step_->used_anywhere);
}

void Reducer::deliver_whole(size_t index) {
  auto& bucket = buckets_[index];
  for (size_t place = 0; place < bucket.members().size(); ++place) {
    const auto member = bucket.members()[place];
    const auto& view = bucket.view(place);
    auto& grad = gradients_[member].parameter.mutable_grad();
    const bool sum = reduction_->plan().everywhere()
                         ? step_->used_anywhere[member]
                         : accumulated_.sums().leave_whole(member, view, step_->used_anywhere[member]);
    if (!sum) {
      if (step_->untouched[member].defined()) at::Tensor(view).copy_(step_->untouched[member]);
    } else if (gradients_[member].reduce_dtype) {
      grad = view.to(gradients_[member].parameter.scalar_type());  // optimizers accept no other dtype
      if (!reduction_->plan().everywhere()) accumulated_.sums().leave_outside_bucket(member);
    } else {
      accumulated_.leave_mean(member, view);
    }
    if (sum && reduction_->plan().everywhere()) accumulated_.note_mean(member);
  }
}

void Reducer::deliver_sparse(size_t index) {
  const auto member = buckets_[index].members().front();
  auto& result = *step_->sparse[index];
  if (result.present > 0) {
    step_->used_anywhere[member] = step_->came_anywhere[member] = true;
    if (result.weight > 0) result.sum.mul_(1.0 / result.weight);
    const double shares = static_cast<double>(result.present) / result.weight;
    if (const auto mean = accumulated_.mean(member); mean.defined() && shares != 1 && result.weight > 0) {
      result.sum = sum_of(result.sum, mean.mul(1 - shares));
    }
  }
  if (!reduction_->plan().everywhere()) {
    if (reduction_->plan().keeps_whole(buckets_[index], reduction_->plan().place(group_.rank()))) {
      accumulated_.sums().leave_sparse(member, result.sum);
    } else {
      accumulated_.sums().leave_parts(index, step_->used_anywhere);
    }
  } else if (result.present > 0) {
    gradients_[member].parameter.mutable_grad() = result.sum;
    accumulated_.note_mean(member);
  }
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

// Whether a reduced bucket suffices to compute its mean: the weight rides in it, in a dtype that can hold it.
bool Reducer::knows_means_early() const {
  const auto exact = [](const Gradient& gradient) {
    return gradient.sparse || c10::elementSize(gradient.dtype()) >= 4;
  };
  return !buckets_.trailer().defined() && std::all_of(gradients_.begin(), gradients_.end(), exact);
}

// A bucket issued before some rank abandoned the step has a weight, on all ranks, so that all of them take it.
void Reducer::take_early(size_t index) {
  const auto& bucket = buckets_[index];
  const double weight = bucket.sparse() ? step_->sparse[index]->weight : bucket.trailer().weight();
  if (std::isnan(weight)) {
    step_->abandoned = true;
    return;
  }
  deliver(index, weight);
  take(index);
}

// Used if means are known only at the end of backward.
void Reducer::take_all() {
  std::vector<at::Tensor> gradients;
  for (const auto& gradient : gradients_) {
    if (gradient.parameter.grad().defined()) gradients.push_back(gradient.parameter.grad());
  }
  options_.consumer->see_all(gradients);
  gradients.clear();
  for (size_t i = 0; i < buckets_.size(); ++i) {
    take(i);
    if (buckets_[i].transient()) buckets_.release(i);
  }
}

void Reducer::take(size_t index) {
  options_.consumer->take(parameters_of(buckets_[index]));
  for (const auto member : buckets_[index].members()) gradients_[member].parameter.mutable_grad().reset();
}

// Runs after backward has ended: a gradient that arrives again before is reported as another error.
void Reducer::leave_spent() {
  for (size_t i = 0; i < gradients_.size(); ++i) {
    if (step_->used_anywhere[i]) spent_->leave(i);
  }
}

}  // namespace shoal
