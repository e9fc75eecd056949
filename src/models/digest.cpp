#include "models/digest.h"

#include "models/hash.h"
#include "models/hash_tensor.h"

namespace shoal::models {

Digest digest(uint64_t index, const at::Tensor& tensor) {
  const auto x = tensor.detach().to(at::kCPU, at::kDouble).flatten();
  const auto weights = unit_tensor(key(0, Purpose::probe, index), x.numel()).to(at::kDouble);
  return {.sum = x.sum().item<double>(),
          .abs_sum = x.abs().sum().item<double>(),
          .l2 = x.square().sum().sqrt().item<double>(),
          .probe = weights.mul_(x).sum().item<double>()};
}

}  // namespace shoal::models
