#pragma once
// One trace of a job from those of its ranks.

#include <filesystem>
#include <string>
#include <vector>

namespace shoal::cli {

// Writes the events of all files in `places`, or of the rank-N.json in folders, to `target` (- for standard output), by
// rank, the first one at 0. Holds one event at a time, whatever the size of the files. UsageError for a file that is
// not a trace of one rank and for two of one rank, before the target is touched.
void merge_traces(const std::vector<std::filesystem::path>& places, const std::string& target);

}  // namespace shoal::cli
