#pragma once
// Metrics file: one JSON object per line, for each step.

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

namespace shoal::cli {

// File that other programs may read while it grows: lines appear complete.
class Metrics {
 public:
  // behind: appends, for a rank that takes over from one that has ended, and for a run that is resumed.
  enum class Start { anew, behind };
  // Empty path: writes nothing. UsageError names a file that cannot be written.
  explicit Metrics(const std::string& path, Start start = Start::anew);
  bool wanted() const { return !path_.empty(); }
  void write(const nlohmann::ordered_json& line);

 private:
  std::string path_;
  std::ofstream file_;
};

}  // namespace shoal::cli
