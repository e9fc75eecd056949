#pragma once
// What happened in each step, one JSON object per line.

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

namespace shoal::cli {

// A file that other programs may read while it grows: every line is complete when it appears.
class Metrics {
 public:
  // Empty: nothing is written. UsageError that names the file when it cannot be.
  explicit Metrics(const std::string& path);
  bool wanted() const { return !path_.empty(); }
  void write(const nlohmann::ordered_json& line);

 private:
  std::string path_;
  std::ofstream file_;
};

}  // namespace shoal::cli
