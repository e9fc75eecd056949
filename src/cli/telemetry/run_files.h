#pragma once
// Files that a run has written: metrics and flight recorders.

#include <filesystem>
#include <optional>
#include <vector>

namespace shoal::cli {

struct RunFiles {
  std::filesystem::path place;                     // as it was given
  std::optional<std::filesystem::path> metrics{};  // of a folder, the *.jsonl that was written last
  std::vector<std::filesystem::path> older{};      // the other *.jsonl of the folder, by name
  std::vector<std::filesystem::path> flights{};    // rank-N.flight, in no order

  std::vector<std::filesystem::path> all() const;
};

// Of a folder, a metrics file, or a flight recorder's file. UsageError where there is none of them.
RunFiles find_run(const std::filesystem::path& place);

}  // namespace shoal::cli
