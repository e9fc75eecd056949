#pragma once
// Reuse of memory for communication buffers.

#include <map>
#include <memory>
#include <mutex>

#include "shoal/group.h"

namespace shoal {

// Tensors in the group's memory (Group::allocate), which a program allocates and drops in every step. Dropped blocks
// are kept for the next tensor of about their size instead of being zeroed and given back to the system: at most 1 GiB
// of them. Contents are arbitrary. Thread-safe; blocks outlive the pool.
class TensorPool : public std::enable_shared_from_this<TensorPool> {
 public:
  explicit TensorPool(Group group) : group_(std::move(group)) {}

  at::Tensor allocate(int64_t numel, const at::TensorOptions& options);

 private:
  void give_back(at::Tensor block);

  const Group group_;
  std::mutex mutex_;                         // guards what follows
  std::multimap<int64_t, at::Tensor> free_;  // by bytes
  int64_t free_bytes_ = 0;
};

}  // namespace shoal
