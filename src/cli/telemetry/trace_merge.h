#pragma once
// Merge of the traces of a job's ranks into one.

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace shoal::cli {

struct MergedTraces {
  int ranks = 0;
  int64_t events = 0;
};

// The files in `places`, and the rank-N.json files in folders. UsageError where there are none.
std::vector<std::filesystem::path> trace_files(const std::vector<std::filesystem::path>& places);

// Writes the events of all files in `places`, or of the rank-N.json files in folders, to `target` (- for standard
// output), ordered by rank, with the first event at time 0. Holds one event at a time, whatever the size of the files.
// UsageError for a file that is not a trace of one rank, and for two files of one rank, before the target is changed.
MergedTraces merge_traces(const std::vector<std::filesystem::path>& places, const std::string& target);

}  // namespace shoal::cli
