#include "engine/gradient_norm.h"

#include <fmt/format.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <cmath>

#include "shoal/base/error.h"

namespace shoal {

namespace {

// What ranks add up: the norm's power, or the largest element.
double part_of_norm(const std::vector<at::Tensor>& gradients, double norm_type) {
  if (!(norm_type > 0)) throw UsageError(fmt::format("norm type {}: it must be positive, or infinity", norm_type));
  const torch::NoGradGuard no_grad;
  double part = 0;
  for (const auto& gradient : gradients) {
    if (gradient.numel() == 0) continue;
    const auto values = gradient.is_sparse() ? gradient.coalesce().values() : gradient;
    const auto norm = at::linalg_vector_norm(values, norm_type, std::nullopt, false, at::kDouble).item<double>();
    if (!std::isinf(norm_type)) {
      part += std::pow(norm, norm_type);
    } else if (std::isnan(norm) || norm > part) {  // a comparison alone would lose NaN
      part = norm;
    }
  }
  return part;
}

double norm_from(double sum, double norm_type) {
  return std::isinf(norm_type) ? sum : std::pow(sum, 1 / norm_type);
}

}  // namespace

double global_norm(const std::vector<at::Tensor>& gradients, double norm_type, const Group& group, const Label& label) {
  auto all = at::full({1}, part_of_norm(gradients, norm_type), at::kDouble);
  group.all_reduce(all, std::isinf(norm_type) ? ReduceOp::max : ReduceOp::sum, label).wait();
  return norm_from(all.item<double>(), norm_type);
}

double local_norm(const std::vector<at::Tensor>& gradients, double norm_type) {
  return norm_from(part_of_norm(gradients, norm_type), norm_type);
}

void clip_to_norm(const std::vector<at::Tensor>& gradients, double norm, double max_norm) {
  const double factor = max_norm / (norm + 1e-6);
  if (factor >= 1) return;
  const torch::NoGradGuard no_grad;
  for (const auto& gradient : gradients) at::Tensor(gradient).mul_(factor);
}

}  // namespace shoal
