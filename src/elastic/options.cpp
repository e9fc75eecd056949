#include <fmt/format.h>
#include <fmt/ranges.h>

#include "shoal/elastic.h"

namespace shoal {

std::string ElasticChange::text() const {
  const auto who = lost.empty()        ? std::string("no rank has ended")
                   : lost.size() == 1U ? fmt::format("rank {} has ended", lost[0])
                                       : fmt::format("ranks {} have ended", fmt::join(lost, ", "));
  return fmt::format("{}; {} rank{} go{} on after step {}{}, {:.0f} ms later", who, ranks, ranks == 1 ? "" : "s",
                     ranks == 1 ? "es" : "", step, finished_step ? ", which was finished" : "", seconds * 1e3);
}

void ElasticOptions::validate(int ranks) const {
  std::vector<std::string> faults;
  if (min_ranks < 1 || min_ranks > ranks) {
    faults.push_back(fmt::format("min_ranks is {}: give 1 to {}, the number of ranks", min_ranks, ranks));
  }
  if (keep_global_batch < 0 || keep_global_batch % ranks != 0) {
    faults.push_back(
        fmt::format("keep_global_batch is {}: give a multiple of {}, the number of ranks, or 0 for a batch that "
                    "shrinks with the ranks",
                    keep_global_batch, ranks));
  }
  if (!faults.empty()) throw UsageError(fmt::format("ElasticOptions: {}", fmt::join(faults, "; ")));
}

}  // namespace shoal
