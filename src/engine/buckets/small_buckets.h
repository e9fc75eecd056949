#pragma once
// Limits of the buckets of ranks that share memory, whose memory is needed only until they are reduced.

#include "engine/buckets/bucket_schedule.h"

namespace shoal {

// small: buckets of at most max_transient_bucket_bytes. Every bucket in flight is fresh memory in every step, and a
// rank that waits here would wait at the end of backward.
inline BucketSchedule::Limits bucket_limits(bool small) {
  BucketSchedule::Limits limits;
  if (small) limits.in_flight = 2;
  return limits;
}

}  // namespace shoal
