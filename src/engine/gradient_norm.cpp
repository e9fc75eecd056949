#include "engine/gradient_norm.h"

#include <fmt/format.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <cmath>

#include "shoal/base/error.h"

namespace shoal {

double global_norm(const std::vector<at::Tensor>& gradients, double norm_type, const Group& group, const Label& label) {
  if (!(norm_type > 0)) throw UsageError(fmt::format("norm type {}: it must be positive, or infinity", norm_type));
  const torch::NoGradGuard no_grad;
  const bool largest = std::isinf(norm_type);
  double local = 0;
  for (const auto& gradient : gradients) {
    if (gradient.numel() == 0) continue;
    const auto values = gradient.is_sparse() ? gradient.coalesce().values() : gradient;
    const auto norm = at::linalg_vector_norm(values, norm_type, std::nullopt, false, at::kDouble).item<double>();
    // A comparison would lose NaN.
    local = largest ? (std::isnan(norm) || norm > local ? norm : local) : local + std::pow(norm, norm_type);
  }
  auto all = at::full({1}, local, at::kDouble);
  group.all_reduce(all, largest ? ReduceOp::max : ReduceOp::sum, label).wait();
  const double total = all.item<double>();
  return largest ? total : std::pow(total, 1 / norm_type);
}

void clip_to_norm(const std::vector<at::Tensor>& gradients, double norm, double max_norm) {
  const double factor = max_norm / (norm + 1e-6);
  if (factor >= 1) return;
  const torch::NoGradGuard no_grad;
  for (auto gradient : gradients) gradient.mul_(factor);
}

}  // namespace shoal
