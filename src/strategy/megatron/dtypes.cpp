#include "strategy/megatron/dtypes.h"

#include <fmt/format.h>

#include <algorithm>

#include "shoal/error.h"

namespace shoal {
namespace {

// Null where there is none.
const NamedTensor* first_of(at::ScalarType dtype, const std::vector<NamedTensor>& trainable) {
  const auto found = std::find_if(trainable.begin(), trainable.end(),
                                  [&](const NamedTensor& entry) { return entry.tensor.scalar_type() == dtype; });
  return found == trainable.end() ? nullptr : &*found;
}

void check_known(const NamedTensor& entry) {
  const auto dtype = entry.tensor.scalar_type();
  if (dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16) return;
  throw UsageError(
      fmt::format("DistributedOptimizer: parameter {} is {}; it must be float16, bfloat16 or float32 (or float64)",
                  entry.name, c10::toString(dtype)));
}

}  // namespace

void check_dtypes(const std::vector<NamedTensor>& trainable, const DistributedOptimizerOptions& options) {
  const auto* half = first_of(at::kHalf, trainable);
  const auto* bfloat = first_of(at::kBFloat16, trainable);
  auto anywhere = at::tensor({half ? 1 : 0, bfloat ? 1 : 0}, at::kInt);
  if (options.model_parallel_group) {
    options.model_parallel_group->all_reduce(anywhere, ReduceOp::max, {-1, -1, "dtypes of parameters"}).wait();
  }
  for (const auto& entry : trainable) check_known(entry);
  if (half && !options.scaler) {
    throw UsageError(fmt::format(
        "DistributedOptimizer: parameter {} is float16, whose gradients underflow without loss scaling; set scaler",
        half->name));
  }
  const bool needed = anywhere[0].item<int>() != 0;
  if (!options.scaler || needed) return;
  if (anywhere[1].item<int>() == 0) {
    throw UsageError(fmt::format("DistributedOptimizer: parameter {} is {}, which does not need a scaler; unset scaler",
                                 trainable.front().name, c10::toString(trainable.front().tensor.scalar_type())));
  }
  if (!options.scaler->dynamic) return;
  throw UsageError(fmt::format(
      "DistributedOptimizer: parameter {} is bfloat16, which requires no scaler, or one with dynamic = false",
      bfloat ? bfloat->name : "of another stage"));
}

}  // namespace shoal
