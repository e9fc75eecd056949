#pragma once
// Adapter from a group to a c10d backend, for Python's torch.distributed, libtorch's own reducer and other users of
// c10d.

#include <optional>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "shoal/group.h"

namespace shoal {

// All collectives of c10d on CPU tensors of any strides, with equal and unequal parts, messages, receives from any
// source, sparse sums and a monitored barrier. Operations end, and futures complete, whether or not somebody waits.
// wait() of a work throws shoal's own errors; works may be waited for in any order, by several threads. A work whose
// handle is dropped goes on. timeout: of an operation whose options have none.
c10::intrusive_ptr<c10d::Backend> make_backend(const Group& group,
                                               std::optional<std::chrono::milliseconds> timeout = {});

// The group that make_backend() got; nothing for other backends.
std::optional<Group> group_of_backend(const c10::intrusive_ptr<c10d::Backend>& backend);

}  // namespace shoal
