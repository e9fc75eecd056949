#include "module/sync.h"

#include "shoal/deferred_init.h"
#include "shoal/group.h"

namespace shoal {

void sync_module(const Group& group, const ModuleTensors& tensors) {
  agree(group, "the model", tensors.describe());
  std::vector<at::Tensor> values;
  for (const auto* list : {&tensors.parameters, &tensors.buffers}) {
    for (const auto& entry : *list) {
      if (!is_deferred(entry.tensor)) values.push_back(entry.tensor);
    }
  }
  broadcast_coalesced(group, values, 0, {-1, -1, "parameters and buffers"});
}

void sync_buffers(const Group& group, const std::vector<NamedTensor>& buffers, int source, int64_t step,
                  const char* what) {
  std::vector<at::Tensor> values;
  for (const auto& entry : buffers) values.push_back(entry.tensor);
  broadcast_coalesced(group, values, source, {step, -1, what});
}

}  // namespace shoal
