#pragma once
// Memory for versions of the buffers that ranks show each other over sockets.

#include <torch/types.h>

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "comm/gossip/channel.h"

namespace shoal {

class ValuesPool {
 public:
  explicit ValuesPool(std::vector<GossipBuffer> buffers) : buffers_(std::move(buffers)) {}

  // Number of buffers.
  size_t size() const { return buffers_.size(); }
  uint64_t bytes_of(size_t buffer) const {
    return static_cast<uint64_t>(buffers_[buffer].numel) * c10::elementSize(buffers_[buffer].dtype);
  }
  // Tensor [numel] that nobody else holds, for a version of the buffer.
  at::Tensor get(size_t buffer) {
    const auto& [numel, dtype] = buffers_[buffer];
    auto& pool = pool_[{numel, dtype}];
    for (auto& tensor : pool) {
      if (tensor.use_count() == 1) return tensor;
    }
    return pool.emplace_back(at::empty({numel}, at::TensorOptions(dtype)));
  }

 private:
  const std::vector<GossipBuffer> buffers_;
  std::map<std::pair<int64_t, at::ScalarType>, std::vector<at::Tensor>> pool_;
};

}  // namespace shoal
