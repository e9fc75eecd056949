#include "models/loss.h"

#include <ATen/ops/cross_entropy_loss.h>

namespace shoal::models {

at::Tensor loss_of(const at::Tensor& logits, const at::Tensor& targets) {
  const auto dtype = c10::promoteTypes(logits.scalar_type(), at::kFloat);
  return at::cross_entropy_loss(logits.to(dtype).reshape({-1, logits.size(-1)}), targets.reshape({-1}));
}

}  // namespace shoal::models
