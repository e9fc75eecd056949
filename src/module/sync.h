#pragma once
// Making modules equal on all ranks.

#include "module/walk.h"
#include "shoal/group.h"

namespace shoal {

// Compares names, shapes, dtypes, layouts and order over the group, then gives every rank rank 0's values. Collective.
// Throws DisagreeError on every rank; nothing has been written then.
void sync_module(const Group& group, const ModuleTensors& tensors);

// A rank's buffers to every rank. Collective.
void sync_buffers(const Group& group, const std::vector<NamedTensor>& buffers, int source, int64_t step);

}  // namespace shoal
