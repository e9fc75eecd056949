#include "engine/wrapper/buffer_sync.h"

#include <torch/utils.h>

#include "module/sync.h"

namespace shoal {

void BufferSync::choose(bool broadcast, std::shared_ptr<BufferHook> hook, BufferHookLocation location) {
  broadcast_ = broadcast;
  hook_ = std::move(hook);
  location_ = location;
}

void BufferSync::before_forward(const Group& group, const std::vector<NamedTensor>& buffers, int lead, int64_t step) {
  complete();
  if (!hook_) {
    if (broadcast_) sync_buffers(group, buffers, lead, step);
    return;
  }
  std::vector<NamedBuffer> named;
  for (const auto& entry : buffers) named.push_back({entry.name, entry.tensor});
  auto begin = [this, group, named, lead, step] {
    const torch::NoGradGuard no_grad;
    return hook_->begin(group, named, lead, {step, -1, "buffers"});
  };
  if (location_ == BufferHookLocation::post_forward) {
    due_ = std::move(begin);
    return;
  }
  pending_ = begin();
  complete();
}

void BufferSync::after_forward() {
  if (!due_) return;
  pending_ = due_();
  due_ = {};
}

void BufferSync::before_evaluation(const Group& group, const std::vector<NamedTensor>& buffers, int lead,
                                   int64_t step) {
  if (std::exchange(evaluated_, step) == step || !broadcast_ || hook_) return;
  sync_buffers(group, buffers, lead, step,
               "buffers, for an evaluation (on one rank alone, call the module's own forward)");
}

void BufferSync::complete() {
  const torch::NoGradGuard no_grad;
  pending_.complete();
  while (const auto next_stage = std::exchange(pending_.next_stage, {})) {
    pending_ = next_stage();
    pending_.complete();
  }
}

}  // namespace shoal
