#pragma once
// Copies of values that may change while they are being written.

#include <torch/types.h>

namespace shoal {

// Size of a copy, rounded up so that the next one is aligned.
int64_t snapshot_bytes(const at::Tensor& values);

// Copies to `memory`, [values.nbytes()] bytes. Training waits for it, so the copy takes one pass whatever the layout,
// on this thread alone: waking others would take longer.
at::Tensor snapshot(const at::Tensor& memory, const at::Tensor& values);

}  // namespace shoal
