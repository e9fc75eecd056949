#pragma once
// Which parameters of this process some wrapper has divided, so that no other one does.

#include <torch/types.h>

namespace shoal {

// Thread-safe.
bool is_divided(const at::Tensor& parameter);
void mark_divided(const at::Tensor& parameter);
void unmark_divided(const at::Tensor& parameter);

}  // namespace shoal
