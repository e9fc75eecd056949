#include "engine/reducer/gradient_delivery.h"

#include <torch/utils.h>

namespace shoal {

GradientDelivery::GradientDelivery(const std::vector<Gradient>& gradients, BucketSet& buckets, const Group& group,
                                   const ReductionPlan& plan, AccumulatedGradients& accumulated, bool leave_grad)
    : gradients_(gradients),
      buckets_(buckets),
      group_(group),
      plan_(plan),
      accumulated_(accumulated),
      leave_grad_(leave_grad) {}

void GradientDelivery::deliver(Step& step, size_t index, double weight) {
  auto& bucket = buckets_[index];
  if (buckets_.all_frozen(index)) return;
  if (bucket.sparse()) return deliver_sparse(step, index);
  if (bucket.trailer().defined()) bucket.trailer().read(step.used_anywhere, step.came_anywhere);
  if (bucket.kept_range().empty() && !plan_.everywhere()) return leave_parts(step, index);
  auto sum = bucket.kept();
  if (const auto held = accumulated_.sums().take_held(index); held.defined()) sum.add_(held);
  const double factor = group_.size() / weight;
  // A weight of zero means that no rank had a sample; the sum is zero already.
  if (factor != 1.0 && weight > 0) scale_sum(step, index, factor);
  if (leave_grad_ && bucket.kept_range().size() == bucket.payload_numel()) {
    deliver_whole(step, index);
    return;
  }
  leave_parts(step, index);
}

// What earlier steps left in grad() is a mean already.
void GradientDelivery::scale_sum(const Step& step, size_t index, double factor) {
  const auto& bucket = buckets_[index];
  const auto add_means = [&](double sign) {
    for (size_t place = 0; place < bucket.members().size(); ++place) {
      const auto mean = mean_in_sum(step, bucket.members()[place]);
      if (mean.defined()) at::Tensor(bucket.view(place)).add_(mean.is_sparse() ? mean.to_dense() : mean, sign);
    }
  };
  add_means(-1);
  bucket.kept().mul_(factor);
  add_means(1);
}

// The sum has it where grad() was in the bucket and this rank's backward did not reach it, too.
at::Tensor GradientDelivery::mean_in_sum(const Step& step, size_t gradient) const {
  const auto& untouched = step.untouched[gradient];
  return untouched.defined() && accumulated_.has_mean(gradient) ? untouched : accumulated_.mean(gradient);
}

// Restores gradients that no rank used.
void GradientDelivery::leave_parts(const Step& step, size_t index) {
  for (const auto member : buckets_[index].members()) {
    if (step.untouched[member].defined() && !step.used_anywhere[member]) mutable_grad(member) = step.untouched[member];
  }
  accumulated_.sums().leave_parts(index, step.used_anywhere);
}

void GradientDelivery::deliver_whole(const Step& step, size_t index) {
  auto& bucket = buckets_[index];
  for (size_t place = 0; place < bucket.members().size(); ++place) {
    const auto member = bucket.members()[place];
    const auto& view = bucket.view(place);
    auto& grad = mutable_grad(member);
    const bool sum = plan_.everywhere() ? step.used_anywhere[member]
                                        : accumulated_.sums().leave_whole(member, view, step.used_anywhere[member]);
    if (!sum) {
      if (step.untouched[member].defined()) at::Tensor(view).copy_(step.untouched[member]);
    } else if (gradients_[member].reduce_dtype) {
      grad = view.to(gradients_[member].parameter.scalar_type());  // optimizers accept no other dtype
      if (!plan_.everywhere()) accumulated_.sums().leave_outside_bucket(member);
    } else {
      accumulated_.leave_mean(member, view);
    }
    if (sum && plan_.everywhere()) accumulated_.note_mean(member);
  }
}

void GradientDelivery::deliver_sparse(Step& step, size_t index) {
  const auto member = buckets_[index].members().front();
  auto& result = *step.sparse[index];
  if (result.present > 0) {
    step.used_anywhere[member] = step.came_anywhere[member] = true;
    if (result.weight > 0) result.sum.mul_(1.0 / result.weight);
    const double shares = static_cast<double>(result.present) / result.weight;
    if (const auto mean = accumulated_.mean(member); mean.defined() && shares != 1 && result.weight > 0) {
      result.sum = sum_of(result.sum, mean.to(result.sum.scalar_type()).mul(1 - shares));
    }
    result.sum = result.sum.to(gradients_[member].parameter.scalar_type());
  }
  if (!plan_.everywhere()) {
    if (plan_.keeps_whole(buckets_[index], plan_.place(group_.rank()))) {
      accumulated_.sums().leave_sparse(member, result.sum);
    } else {
      accumulated_.sums().leave_parts(index, step.used_anywhere);
    }
  } else if (result.present > 0) {
    mutable_grad(member) = result.sum;
    accumulated_.note_mean(member);
  }
}

}  // namespace shoal
