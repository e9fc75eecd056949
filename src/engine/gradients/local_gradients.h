#pragma once
// Which gradients of this process have been accumulated on this rank alone (under no_sync) and not been averaged yet.

#include <torch/types.h>

#include <string>

namespace shoal {

// grad() as it is now is local. Thread-safe, as are the others.
void mark_local(const at::Tensor& parameter);
void unmark_local(const at::Tensor& parameter);

// Whether grad() is still the tensor that was marked, and not zeroed.
bool has_local_gradient(const at::Tensor& parameter);
// UsageError if so. For optimizers that give all ranks one result, which a rank's own gradient must not become; who:
// their class.
void require_no_local_gradient(const at::Tensor& parameter, const std::string& who, const std::string& name);

}  // namespace shoal
