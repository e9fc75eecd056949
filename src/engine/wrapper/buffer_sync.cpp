#include "engine/wrapper/buffer_sync.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/utils.h>

#include <algorithm>

#include "module/sync.h"
#include "shoal/error.h"

namespace shoal {

void BufferSync::choose(bool broadcast, std::shared_ptr<BufferHook> hook, BufferHookLocation location) {
  broadcast_ = broadcast;
  hook_ = std::move(hook);
  location_ = location;
}

// The transport knows only that the number of elements differs.
void BufferSync::sync(const Group& group, const std::vector<NamedTensor>& buffers, int source, int64_t step,
                      const char* what) {
  std::vector<std::string> changed;
  for (size_t i = 0; i < std::min(sizes_.size(), buffers.size()); ++i) {
    if (buffers[i].tensor.sizes() == at::IntArrayRef(sizes_[i])) continue;
    changed.push_back(fmt::format("{} is [{}] and was [{}]", buffers[i].name,
                                  fmt::join(buffers[i].tensor.sizes(), ", "), fmt::join(sizes_[i], ", ")));
  }
  try {
    sync_buffers(group, buffers, source, step, what);
  } catch (const DisagreeError& error) {
    const auto here = changed.empty() ? "none has changed" : fmt::format("{}", fmt::join(changed, "; "));
    throw DisagreeError(fmt::format(
        "{}. If the numbers of elements differ, a buffer has another size on some rank (here {}): give it the same "
        "size on all ranks, leave it out (ignored), or set broadcast_buffers = false",
        error.what(), here));
  }
  if (!changed.empty() || sizes_.empty()) {
    sizes_.clear();
    for (const auto& entry : buffers) sizes_.push_back(entry.tensor.sizes().vec());
  }
}

void BufferSync::before_forward(const Group& group, const std::vector<NamedTensor>& buffers, int lead, int64_t step) {
  complete();
  if (!hook_) {
    if (broadcast_) sync(group, buffers, lead, step, "buffers");
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
  if (evaluated_ == step || !broadcast_ || hook_) return;
  sync(group, buffers, lead, step, "buffers, for an evaluation (on one rank alone, call the module's own forward)");
  evaluated_ = step;
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
