#pragma once
// Translation of DistributedDataParallel's options for the engine.

#include "engine/reducer/gradient_reduction.h"
#include "shoal/ddp.h"

namespace shoal {

inline BucketCaps bucket_caps(const DistributedDataParallelOptions& options) {
  constexpr double mebibyte = 1 << 20;
  return {.first_bytes = static_cast<int64_t>(options.first_bucket_mb * mebibyte),
          .bytes = static_cast<int64_t>(options.bucket_cap_mb * mebibyte)};
}

}  // namespace shoal
