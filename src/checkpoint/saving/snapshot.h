#pragma once
// Copies of values that may change while they are written.

#include <torch/types.h>

namespace shoal {

// Bytes for a copy, so that the next one is aligned.
int64_t snapshot_bytes(const at::Tensor& values);

// A copy in `memory`, [values.nbytes()] bytes. Training waits for it: so in one pass, whatever the layout, and by this
// thread alone, since others would have to be woken and waited for.
at::Tensor snapshot(const at::Tensor& memory, const at::Tensor& values);

}  // namespace shoal
