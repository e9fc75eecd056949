#pragma once
// Adapter from a group to a c10d backend, for libtorch's own reducer, Python's torch.distributed and other users of
// c10d.

#include <optional>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "shoal/group.h"

namespace shoal {

// Supports CPU tensors, all collectives of c10d with equal and unequal parts, coalesced forms, send and recv with tags,
// and futures. wait() of a work throws shoal's own errors. Tensors must be contiguous. Works may be waited for in any
// order. Deadlines are the world's; timeouts in c10d's options are ignored.
c10::intrusive_ptr<c10d::Backend> make_backend(const Group& group);

// The group that make_backend() got; nothing for other backends.
std::optional<Group> group_of_backend(const c10d::Backend& backend);

}  // namespace shoal
