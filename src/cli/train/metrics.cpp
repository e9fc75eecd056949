#include "cli/train/metrics.h"

#include <fmt/format.h>

#include "shoal/error.h"

namespace shoal::cli {

Metrics::Metrics(const std::string& path, Start start) : path_(path) {
  if (path_.empty()) return;
  file_.open(path_, start == Start::anew ? std::ios::trunc : std::ios::app);
  if (!file_) throw UsageError(fmt::format("--metrics: cannot write {}", path_));
}

void Metrics::write(const nlohmann::ordered_json& line) {
  if (path_.empty()) return;
  file_ << line.dump() + '\n' << std::flush;
  if (!file_) throw UsageError(fmt::format("--metrics: cannot write {}: is the disk full?", path_));
}

}  // namespace shoal::cli
