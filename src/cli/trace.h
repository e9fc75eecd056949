#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "shoal/comm/timeline.h"

namespace shoal::cli {

// Writes `folder`/rank-RANK.json for chrome://tracing or Perfetto: one process per rank, one row per thread, and a
// track for what overlaps. Times are microseconds of rank 0's clock; `clock`: see clock_offset. Throws UsageError that
// names the file.
void write_trace(const std::string& folder, const Timeline& timeline, int rank, Clock::duration clock);

// Makes one trace of those of a job's ranks, its first event at 0. UsageError for a file that is not one, and for two
// of one rank.
void merge_traces(const std::vector<std::filesystem::path>& places, const std::string& target);

}  // namespace shoal::cli
