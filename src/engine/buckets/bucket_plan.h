#pragma once
// Which gradients travel together.

#include <torch/types.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace shoal {

// A trainable parameter as the engine sees it.
struct Gradient {
  std::string name;
  at::Tensor parameter;
  bool sparse = false;                                      // its gradient is a sparse tensor
  std::optional<at::ScalarType> travels_as = std::nullopt;  // dtype of the sum, where it is not the parameter's own

  at::ScalarType dtype() const { return travels_as.value_or(parameter.scalar_type()); }
};

// Assigns gradients to buckets, walking them in `order` (the expected order of their arrival). Dtypes (of gradients and
// of their parameters, which may lie in a buffer of the same layout) and devices are not mixed, nor gradients of
// different `owners` (by number of the gradient, where given); a bucket closes when it holds at least `cap_bytes` (the
// first of each dtype: `first_cap_bytes`), or before it would hold more than `most_numel` elements, alignment included;
// a sparse gradient has a bucket of its own. Buckets come in the order in
// which they are complete. Every gradient is in exactly one. (The scheme of c10d's Reducer.)
std::vector<std::vector<size_t>> plan_buckets(const std::vector<Gradient>& gradients, std::span<const size_t> order,
                                              int64_t first_cap_bytes, int64_t cap_bytes,
                                              std::span<const int> owners = {},
                                              std::optional<int64_t> most_numel = std::nullopt);

}  // namespace shoal
