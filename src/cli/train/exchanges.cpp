#include "cli/train/exchanges.h"

#include <fmt/format.h>

namespace shoal::cli {

std::string missed_exchanges(const TrainingCore& training) {
  const auto* seen = training.exchanges();
  if (seen == nullptr) return "";
  const auto missed = seen->skipped + seen->older;
  std::string text = missed > 0 ? fmt::format("{} exchanges missed", missed) : "";
  if (!seen->removed.empty()) text += fmt::format("{}{} ranks gone", text.empty() ? "" : ", ", seen->removed.size());
  return text;
}

std::vector<std::pair<std::string, double>> exchange_figures(TrainingCore& training) {
  if (training.exchanges() == nullptr) return {};
  const double distance = training.consensus_distance();
  const auto& seen = *training.exchanges();
  return {{"consensus_distance", distance},
          {"exchanged", static_cast<double>(seen.exchanged)},
          {"newer", static_cast<double>(seen.newer)},
          {"older", static_cast<double>(seen.older)},
          {"skipped", static_cast<double>(seen.skipped)},
          {"removed", static_cast<double>(seen.removed.size())}};
}

}  // namespace shoal::cli
