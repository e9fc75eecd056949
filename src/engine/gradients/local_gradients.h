#pragma once
// Registry of gradients that this rank accumulated alone (under no_sync) and no step has averaged yet.

#include <torch/types.h>

#include <string>

namespace shoal {

// Marks the present grad() as local. Thread-safe, like the other functions.
void mark_local(const at::Tensor& parameter);
void unmark_local(const at::Tensor& parameter);

// Whether grad() is still the marked tensor, and not all zero.
bool has_local_gradient(const at::Tensor& parameter);
// UsageError if it has one. For optimizers that give all ranks the same result, which a rank's own gradient would
// break. who: the optimizer's class.
void require_no_local_gradient(const at::Tensor& parameter, const std::string& who, const std::string& name);
// UsageError for clipping while Elastic computes one share of a rank's batch after the other.
[[noreturn]] void refuse_to_clip_shares();

}  // namespace shoal
