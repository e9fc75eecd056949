#pragma once
// Delivery of means, from reduced buckets to grad().

#include <vector>

#include "engine/buckets/reduction_plan.h"
#include "engine/gradients/accumulated_gradients.h"
#include "engine/reducer/step.h"
#include "shoal/group.h"

namespace shoal {

// Where every rank gets the whole mean, grad() becomes the mean. Elsewhere this rank's part of it stays in the bucket
// (EarlierSums).
class GradientDelivery {
 public:
  // The references must outlive this object. leave_grad: see ReducerOptions.
  GradientDelivery(const std::vector<Gradient>& gradients, BucketSet& buckets, const Group& group,
                   const ReductionPlan& plan, AccumulatedGradients& accumulated, bool leave_grad);

  // Call once a bucket has been reduced. weight: sum of the ranks' weights.
  void deliver(Step& step, size_t bucket, double weight);

 private:
  void scale_sum(const Step& step, size_t bucket, double factor);
  at::Tensor mean_in_sum(const Step& step, size_t gradient) const;
  void deliver_whole(const Step& step, size_t bucket);
  void leave_parts(const Step& step, size_t bucket);
  void deliver_sparse(Step& step, size_t bucket);
  at::Tensor& mutable_grad(size_t gradient) const { return gradients_[gradient].parameter.mutable_grad(); }

  const std::vector<Gradient>& gradients_;
  BucketSet& buckets_;
  const Group& group_;
  const ReductionPlan& plan_;
  AccumulatedGradients& accumulated_;
  bool leave_grad_;
};

}  // namespace shoal
