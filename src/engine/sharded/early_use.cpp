#include "engine/sharded/early_use.h"

#include <fmt/format.h>

#include <algorithm>

#include "comm/group/text.h"
#include "shoal/error.h"

namespace shoal {

void meet_without_early_use(const Group& group, const std::string& error, const Label& label) {
  if (group.all_reduce(error.empty() ? 0.0 : 1.0, ReduceOp::max, label) == 0) return;
  const auto texts = all_gather_text(group, error, label);
  const auto first = std::find_if(texts.begin(), texts.end(), [](const auto& text) { return !text.empty(); });
  throw UsageError(fmt::format("rank {}: {}", group.world_rank(static_cast<int>(first - texts.begin())), *first));
}

}  // namespace shoal
