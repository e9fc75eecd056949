#pragma once

#include <string>

#include "shoal/comm/call_log.h"

namespace shoal::cli {

// Writes the log for chrome://tracing or Perfetto: one process per rank, one row per group, microseconds of a clock
// that the ranks of a host share. Throws UsageError that names the file.
void write_trace(const std::string& path, const CallLog& log, int rank);

}  // namespace shoal::cli
