#pragma once
// What takes over the broadcast of rank 0's buffers. After the buffer hooks of PyTorch's DistributedDataParallel.

#include <torch/types.h>

#include <string>
#include <vector>

#include "shoal/engine/communication_hook.h"

namespace shoal {

// When a buffer hook is called, of a step that synchronises: before forward, which waits for it; or after it, and then
// it has until the end of backward.
enum class BufferHookLocation { pre_forward, post_forward };

struct NamedBuffer {
  std::string name;
  at::Tensor buffer;  // the module's own
};

// Makes buffers what they should be on all ranks. Derive from it; members are its state.
class BufferHook {
 public:
  virtual ~BufferHook() = default;
  // lead: the lowest rank that has a batch (Join; else 0). Collective: the same calls on every rank, also on one whose
  // forward has failed or that has no batch.
  virtual PendingExchange begin(const Group& group, const std::vector<NamedBuffer>& buffers, int lead,
                                const Label& label) = 0;
};

}  // namespace shoal
