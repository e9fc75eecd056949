#include <fmt/format.h>
#include <fmt/ranges.h>

#include "shoal/elastic.h"

namespace shoal {

std::string ElasticChange::text() const {
  std::vector<std::string> ranks_lost;
  for (size_t i = 0; i < lost.size(); ++i) {
    const bool renumbered = i < lost_first.size() && lost_first[i] != lost[i];
    ranks_lost.push_back(renumbered ? fmt::format("{} (number {} of the launcher)", lost[i], lost_first[i])
                                    : std::to_string(lost[i]));
  }
  auto who = lost.empty() ? std::string("no rank has ended")
                          : fmt::format("rank{} {} {} ended", lost.size() == 1 ? "" : "s", fmt::join(ranks_lost, ", "),
                                        lost.size() == 1 ? "has" : "have");
  if (!joined.empty()) {
    const auto come = fmt::format("{} {} joined (number {} of the launcher)",
                                  joined.size() == 1 ? "a rank" : fmt::format("{} ranks", joined.size()),
                                  joined.size() == 1 ? "has" : "have", fmt::join(joined, ", "));
    who = lost.empty() ? come : who + ", " + come;
  }
  return fmt::format("{}; {} rank{} go{} on after step {}{}, {:.0f} ms later{}{}", who, ranks, ranks == 1 ? "" : "s",
                     ranks == 1 ? "es" : "", step, finished_step ? ", which was finished" : "", seconds * 1e3,
                     taken_over.empty() ? "" : "; ", taken_over);
}

std::string ElasticChange::metrics_line() const {
  return fmt::format(
      R"({{"step":{},"event":"{}","generation":{},"lost":[{}],"joined":[{}],"ranks":{},"finished_step":{},"recovery_ms":{:.3f},"taken_over":"{}"}})",
      step, text(), generation, fmt::join(lost_first, ","), fmt::join(joined, ","), ranks, finished_step ? 1 : 0,
      seconds * 1e3, taken_over);
}

void ElasticOptions::validate(int ranks) const {
  std::vector<std::string> faults;
  if (min_ranks < 1 || min_ranks > ranks) {
    faults.push_back(fmt::format("min_ranks is {}: give 1 to {}, the number of ranks", min_ranks, ranks));
  }
  if (batch_slices < 0 || (batch_slices > 0 && (batch_slices < ranks || keep_global_batch == 0))) {
    faults.push_back(fmt::format(
        "batch_slices is {}: give 0, or with keep_global_batch at least {}, the number of ranks", batch_slices, ranks));
  } else if (keep_global_batch < 0 || keep_global_batch % (batch_slices > 0 ? batch_slices : ranks) != 0) {
    faults.push_back(
        fmt::format("keep_global_batch is {}: give a multiple of {}, the number of {}, or 0 for a batch that "
                    "shrinks with the ranks",
                    keep_global_batch, batch_slices > 0 ? batch_slices : ranks, batch_slices > 0 ? "slices" : "ranks"));
  }
  if (!(straggler_seconds >= 0))
    faults.push_back(fmt::format("straggler_seconds is {}: give 0 or more", straggler_seconds));
  if (!(silent_host_seconds >= 0.5 && silent_host_seconds < 1e6))
    faults.push_back(fmt::format("silent_host_seconds is {}: give 0.5 or more, below 1e6", silent_host_seconds));
  if (static_cast<bool>(save_state) != static_cast<bool>(load_state))
    faults.emplace_back("save_state and load_state: set both or neither");
  if (!faults.empty()) throw UsageError(fmt::format("ElasticOptions: {}", fmt::join(faults, "; ")));
}

}  // namespace shoal
