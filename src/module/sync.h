#pragma once
// Synchronisation of modules over ranks.

#include "module/walk.h"
#include "shoal/group.h"

namespace shoal {

// Compares names, shapes, dtypes, layouts and order over the group, then broadcasts rank 0's values. Collective.
// DisagreeError on every rank, before anything is written.
void sync_module(const Group& group, const ModuleTensors& tensors);

// Broadcasts the buffers of rank `source`. what: for errors. Collective.
void sync_buffers(const Group& group, const std::vector<NamedTensor>& buffers, int source, int64_t step,
                  const char* what = "buffers");

}  // namespace shoal
