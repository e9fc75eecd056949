#pragma once
// Metrics file: one JSON object per line and step.

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

namespace shoal::cli {

// A file that other programs may read while it grows: every line is complete when it appears.
class Metrics {
 public:
  // A rank that takes over from one that has ended goes on behind what that has written.
  enum class Start { anew, behind };
  // Empty: nothing is written. UsageError that names the file when it cannot be.
  explicit Metrics(const std::string& path, Start start = Start::anew);
  bool wanted() const { return !path_.empty(); }
  void write(const nlohmann::ordered_json& line);

 private:
  std::string path_;
  std::ofstream file_;
};

}  // namespace shoal::cli
