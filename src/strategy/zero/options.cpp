// Options of OSS and ShardedDataParallel.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <string>
#include <vector>

#include "shoal/error.h"
#include "shoal/zero.h"

namespace shoal {

void OSSOptions::validate() const {
  if (broadcast_buffer_size == 0 || broadcast_buffer_size < -1) {
    throw UsageError(fmt::format("OSS: broadcast_buffer_size {}: give elements, or -1 for a rank's whole share",
                                 broadcast_buffer_size));
  }
}

void ShardedDataParallelOptions::validate() const {
  std::vector<std::string> faults;
  if (reduce_buffer_size < 1) {
    faults.push_back(fmt::format("reduce_buffer_size {}: give at least 1 element", reduce_buffer_size));
  }
  if (buffer_hook && !broadcast_buffers) {
    faults.emplace_back(
        "buffer_hook replaces the broadcast of broadcast_buffers: set broadcast_buffers, or unset the hook");
  }
  if (reduce_fp16 && communication_hook) {
    faults.push_back(fmt::format("reduce_fp16 and communication_hook {} exclude each other: unset one of them",
                                 communication_hook->name()));
  }
  if (reduce_fp16 && grad_reduce_in_fp32) {
    faults.emplace_back("reduce_fp16 and grad_reduce_in_fp32 exclude each other: unset one of them");
  }
  if (!faults.empty()) throw UsageError(fmt::format("ShardedDataParallel: {}", fmt::join(faults, "; ")));
}

}  // namespace shoal
