#include "models/reference_init.h"

#include <ATen/core/grad_mode.h>

#include <cmath>
#include <optional>

#include "models/hash.h"
#include "models/hash_tensor.h"

namespace shoal::models {

void reference_init(torch::nn::Module& module, uint64_t seed) {
  const at::NoGradGuard no_grad;
  std::optional<float> scale;  // none within a norm
  uint64_t number = 0;
  for (auto& item : module.named_parameters()) {
    auto& parameter = item.value();
    const bool is_weight = item.key().ends_with("weight");
    if (parameter.dim() >= 2) {
      scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(parameter.numel() / parameter.size(0))));
    } else if (is_weight) {
      scale.reset();
    }
    if (scale) {
      const auto stream = key(seed, Purpose::parameter, number);
      parameter.copy_(unit_tensor(stream, parameter.numel()).mul_(*scale).view(parameter.sizes()));
    } else {
      parameter.fill_(is_weight ? 1.0 : 0.0);
    }
    ++number;
  }
}

}  // namespace shoal::models
