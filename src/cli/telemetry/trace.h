#pragma once
// Traces of a rank's timeline, as files for trace viewers.

#include <cstddef>
#include <cstdint>
#include <string>

#include "shoal/telemetry.h"

namespace shoal::cli {

// Removes the files of an earlier run, which may have had more ranks: rank-N.json.
void remove_traces(const std::string& folder);

// Writes `folder`/rank-RANK.json for chrome://tracing or Perfetto: one process per rank, one row per thread, and a
// track for overlapping spans. Times are microseconds of rank 0's clock; clock: see clock_offset. last: leaves
// out all but so many spans. UsageError names the file.
void write_trace(const std::string& folder, const Timeline& timeline, int rank, Clock::duration clock,
                 size_t last = SIZE_MAX);

}  // namespace shoal::cli
