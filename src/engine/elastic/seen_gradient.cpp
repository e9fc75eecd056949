#include "engine/elastic/seen_gradient.h"

#include <torch/utils.h>

#include <algorithm>
#include <cstring>

#include "memory/views.h"

namespace shoal {
namespace {

at::Tensor sample_of(const at::Tensor& gradient) {
  constexpr int64_t most = 64;
  const auto flat = in_memory_order(gradient.detach());
  return flat.slice(0, 0, flat.numel(), std::max<int64_t>(1, flat.numel() / most)).clone();
}

bool equal_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() && std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

}  // namespace

SeenGradient::SeenGradient(const at::Tensor& gradient) : gradient_(gradient) {
  if (!gradient_.defined()) return;
  version_ = gradient_._version();
  sample_ = sample_of(gradient_);
}

bool SeenGradient::is(const at::Tensor& now) const {
  if (!gradient_.defined() || !now.defined()) return !gradient_.defined() && !now.defined();
  return now.is_same(gradient_) && now._version() == version_ && equal_bytes(sample_of(now), sample_);
}

}  // namespace shoal
