#pragma once
// A group as a c10d backend, so that whatever speaks c10d (libtorch's own reducer, Python's torch.distributed) can use
// it.

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "shoal/group.h"

namespace shoal {

// CPU tensors, all collectives of c10d with equal and unequal parts, coalesced forms, send and recv with tags, futures.
// Errors come out of the works' wait() as shoal's own. Tensors must be contiguous. Works may be waited for in any
// order. Deadlines are the world's; the timeouts in c10d's options are not used.
c10::intrusive_ptr<c10d::Backend> make_backend(const Group& group);

}  // namespace shoal
