#include "models/hash_tensor.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include "models/hash.h"

namespace shoal::models {

at::Tensor unit_tensor(uint64_t k, int64_t count) {
  constexpr int64_t grain = 1 << 16;
  auto result = at::empty({count}, at::kFloat);
  float* values = result.mutable_data_ptr<float>();
  at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) values[i] = unit(draw(k, i));
  });
  return result;
}

}  // namespace shoal::models
