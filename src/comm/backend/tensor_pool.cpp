#include "comm/backend/tensor_pool.h"

#include <algorithm>

#include "comm/group/group_state.h"
#include "comm/rendezvous/world_state.h"
#include "shoal/error.h"

namespace shoal {
namespace {

constexpr int64_t most_free_bytes = int64_t{1} << 30;

// Sizes in steps of at most a quarter, so that buffers of similar sizes share blocks.
int64_t rounded(int64_t bytes) {
  int64_t step = 1024;
  while (step * 8 < bytes) step *= 2;
  return std::max<int64_t>(4096, (bytes + step - 1) / step * step);
}

}  // namespace

at::Tensor TensorPool::allocate(int64_t numel, const at::TensorOptions& options) {
  if (!options.device().is_cpu()) throw UsageError("the backend shoal allocates CPU tensors only");
  if (numel < 0) throw UsageError("a tensor cannot have a negative number of elements");
  const auto bytes = rounded(numel * static_cast<int64_t>(options.dtype().itemsize()));
  at::Tensor block;
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = free_.find(bytes); found != free_.end()) {
      block = std::move(found->second);
      free_.erase(found);
      free_bytes_ -= bytes;
    }
  }
  if (!block.defined()) block = group_.allocate(bytes, at::kByte);
  auto* data = block.data_ptr();
  return at::from_blob(
      data, {numel}, [pool = shared_from_this(), block](void*) mutable { pool->give_back(std::move(block)); }, options);
}

void TensorPool::give_back(at::Tensor block) {
  if (state_of(group_)->world->is_forked_copy()) return;  // the lock may be held for ever
  const auto bytes = static_cast<int64_t>(block.nbytes());
  const std::lock_guard lock(mutex_);
  if (free_bytes_ + bytes > most_free_bytes) return;
  free_bytes_ += bytes;
  free_.emplace(bytes, std::move(block));
}

}  // namespace shoal
