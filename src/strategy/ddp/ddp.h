#pragma once
// Translation of DistributedDataParallel's options for the engine.

#include "base/limits.h"
#include "engine/reducer/gradient_reduction.h"
#include "shoal/ddp.h"

namespace shoal {

inline BucketCaps bucket_caps(const DistributedDataParallelOptions& options) {
  return {.first_bytes = bytes_of_mebibytes(options.first_bucket_mb),
          .bytes = bytes_of_mebibytes(options.bucket_cap_mb)};
}

}  // namespace shoal
