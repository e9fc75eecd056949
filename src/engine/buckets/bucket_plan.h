#pragma once
// Assignment of gradients to buckets.

#include <torch/types.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace shoal {

// Trainable parameter as the engine sees it.
struct Gradient {
  std::string name;
  at::Tensor parameter;
  bool sparse = false;                                        // the gradient is a sparse tensor
  std::optional<at::ScalarType> reduce_dtype = std::nullopt;  // dtype of the reduction, if not the parameter's

  at::ScalarType dtype() const { return reduce_dtype.value_or(parameter.scalar_type()); }
};

// Most bytes of a bucket whose memory is needed only until it is reduced, among ranks that share memory. The system
// takes that memory back after a step, and each page that the next step touches costs as much as twenty copies of it.
// Ranks of one host need no large buckets: a collective costs them microseconds.
inline constexpr int64_t max_transient_bucket_bytes = int64_t{4} << 20;

// Assigns gradients to buckets in `order`, the order in which they are expected to arrive (the scheme of c10d's
// Reducer). A bucket holds gradients of one dtype, of parameters of one dtype (which may lie in a flat buffer of the
// same layout), of one device and, if `owners` is given (by gradient), of one owner. A bucket closes once it holds
// `cap_bytes` (the first of each kind: `first_cap_bytes`), or before it would exceed `most_numel` elements, alignment
// included. A sparse gradient has a bucket of its own. Returns the buckets in the order in which they fill; every
// gradient is in exactly one.
std::vector<std::vector<size_t>> plan_buckets(const std::vector<Gradient>& gradients, std::span<const size_t> order,
                                              int64_t first_cap_bytes, int64_t cap_bytes,
                                              std::span<const int> owners = {},
                                              std::optional<int64_t> most_numel = std::nullopt);

}  // namespace shoal
