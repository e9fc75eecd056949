#include "engine/gradients/gradient_norm.h"

#include <fmt/format.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <cmath>
#include <limits>

#include "shoal/error.h"

namespace shoal {

namespace {

// This rank's part: the sum of powers, or the largest or smallest element; and the number of tensors.
struct PartOfNorm {
  double value = 0;
  int64_t tensors = 0;
};

PartOfNorm part_of_norm(const std::vector<at::Tensor>& gradients, double norm_type) {
  if (std::isnan(norm_type)) throw UsageError("norm type nan: give a number, or infinity");
  const torch::NoGradGuard no_grad;
  PartOfNorm part;
  if (std::isinf(norm_type) && norm_type < 0) part.value = std::numeric_limits<double>::infinity();
  for (const auto& gradient : gradients) {
    ++part.tensors;
    if (gradient.numel() == 0 || norm_type == 0) continue;
    const auto values = gradient.is_sparse() ? gradient.coalesce().values() : gradient;
    const auto norm = at::linalg_vector_norm(values, norm_type, std::nullopt, false, at::kDouble).item<double>();
    if (!std::isinf(norm_type)) {
      part.value += std::pow(norm, norm_type);
    } else if (std::isnan(norm) || (norm_type > 0 ? norm > part.value : norm < part.value)) {
      part.value = norm;  // std::max would lose NaN
    }
  }
  return part;
}

double norm_from(const PartOfNorm& all, double norm_type) {
  if (all.tensors == 0 || norm_type == 0) return static_cast<double>(all.tensors);
  return std::isinf(norm_type) ? all.value : std::pow(all.value, 1 / norm_type);
}

}  // namespace

double global_norm(const std::vector<at::Tensor>& gradients, double norm_type, const Group& group, const Label& label) {
  return global_norm(gradients, norm_type, std::vector<Group>{group}, label);
}

double global_norm(const std::vector<at::Tensor>& gradients, double norm_type, const std::vector<Group>& groups,
                   const Label& label) {
  auto part = part_of_norm(gradients, norm_type);
  const bool smallest = std::isinf(norm_type) && norm_type < 0;
  // The smallest element is the largest of the negated ones.
  auto all = at::tensor({smallest ? -part.value : part.value, static_cast<double>(part.tensors)}, at::kDouble);
  for (const auto& group : groups) {
    group.all_reduce(all, std::isinf(norm_type) ? ReduceOp::max : ReduceOp::sum, label).wait();
  }
  const auto value = all[0].item<double>();
  return norm_from({smallest ? -value : value, all[1].item<int64_t>()}, norm_type);
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
