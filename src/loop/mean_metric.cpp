#include <fmt/format.h>

#include <cmath>

#include "shoal/error.h"
#include "shoal/metrics.h"

namespace shoal {

void MeanMetric::update(double value, double weight) {
  if (!(weight >= 0) || std::isinf(weight)) {
    throw UsageError(fmt::format("MeanMetric: weight {}; give 0 or more", weight));
  }
  if (weight > 0) sum_ += value * weight;
  weight_ += weight;
}

void MeanMetric::update(const at::Tensor& values) {
  if (!values.defined() || values.is_complex()) {
    throw UsageError("MeanMetric: give a tensor of real numbers, or a value and its weight");
  }
  if (values.numel() == 0) return;
  const auto exact = values.is_floating_point() ? at::kDouble : at::kLong;
  const auto sum = values.detach().sum(exact);
  sum_ += values.is_floating_point() ? sum.item<double>() : static_cast<double>(sum.item<int64_t>());
  weight_ += static_cast<double>(values.numel());
}

double MeanMetric::compute() const {
  const auto all = group_.all_reduce(std::vector<double>{sum_, weight_}, ReduceOp::sum, {-1, -1, "metric"});
  if (all[1] == 0) throw UsageError("MeanMetric: compute() before an update() with a weight above 0 on any rank");
  return all[0] / all[1];
}

}  // namespace shoal
