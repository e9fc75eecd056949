#pragma once
// A gradient as it was in the commit of a step.

#include <torch/types.h>

#include <cstdint>

namespace shoal {

// Tells whether a gradient has changed since: its version, and some of its elements, because libtorch's clip_grad_norm_
// multiplies all through data(), past the version.
class SeenGradient {
 public:
  // There is none.
  SeenGradient() = default;
  explicit SeenGradient(const at::Tensor& gradient);
  // Whether `now` is the same tensor, with the same values; or undefined, as it was.
  bool is(const at::Tensor& now) const;

 private:
  at::Tensor gradient_{};
  uint32_t version_ = 0;
  at::Tensor sample_{};
};

}  // namespace shoal
