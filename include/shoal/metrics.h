#pragma once
// Metrics over ranks.

#include <torch/types.h>

#include <utility>

#include "shoal/group.h"

namespace shoal {

// Mean of values over all ranks, each with a weight, after torchmetrics.MeanMetric: the sum of value * weight of all
// ranks, divided by the sum of all weights, in float64. So it does not depend on how samples are shared out, where a
// mean of the ranks' means does.
//
//   shoal::MeanMetric loss(world.group()), accuracy(world.group());
//   for (auto& batch : *loader) {
//     auto logits = parallel.forward(batch.data);
//     loss.update(cross_entropy(logits, batch.target).item<double>(), batch.target.size(0));
//     accuracy.update(logits.argmax(1).eq(batch.target));
//   }
//   world.print0("loss", loss.compute(), "accuracy", accuracy.compute());
//
// Copyable. Not thread-safe.
class MeanMetric {
 public:
  explicit MeanMetric(Group group) : group_(std::move(group)) {}

  // A value that stands for `weight` samples. UsageError for a negative weight, NaN or infinity as weight. Not
  // collective; ranks may call it unequally often.
  void update(double value, double weight = 1);
  // All elements of a tensor of any shape, device and real dtype, each with weight 1. Counts (bool, integers) are
  // exact.
  void update(const at::Tensor& values);

  // The mean over all ranks, the same on all of them. Goes on with what was there. UsageError on every rank where all
  // weights are 0. Collective.
  double compute() const;
  // Forgets everything on this rank.
  void reset() { sum_ = weight_ = 0; }

  // This rank's own.
  double sum() const { return sum_; }
  double weight() const { return weight_; }

 private:
  Group group_;
  double sum_ = 0;
  double weight_ = 0;
};

}  // namespace shoal
