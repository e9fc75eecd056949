#include "elastic/dropped_steps.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "shoal/error.h"

namespace shoal {

// A step that was abandoned, or whose gradients have been reduced, has ended on all ranks; one that a wrapper knows to
// have failed, in forward or backward, does so in the next forward.
void DroppedSteps::begin_step(const ElasticParts& parts) {
  const auto began_at = std::exchange(left_at_, std::nullopt);
  if (began_at && parts.reduces() && *began_at == parts.step() && !parts.is_broken()) ++count_;
}

void DroppedSteps::require_equal(const std::vector<double>& by_rank) {
  const auto least = *std::min_element(by_rank.begin(), by_rank.end());
  std::vector<size_t> ranks;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    if (by_rank[rank] > least) ranks.push_back(rank);
  }
  if (ranks.empty()) return;
  throw UsageError(fmt::format(
      "Elastic: the first function of step() has thrown on rank {} before its backward, and the loop went on, so that "
      "its next samples may have met those of the step before on the other ranks. Catch errors, and repeat what has "
      "failed, within that function; or call abandon_step() where you catch them, of DistributedOptimizer, or of the "
      "wrapper after its forward: the others get StepAbandoned",
      fmt::join(ranks, ", ")));
}

}  // namespace shoal
