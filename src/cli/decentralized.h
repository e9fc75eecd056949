#pragma once
// `shoal train --strategy decentralized`.

#include "cli/strategies.h"
#include "shoal/strategy/decentralized.h"

namespace shoal::cli {

// See make_strategy.
std::unique_ptr<Strategy> make_decentralized(const TrainOptions& options, const std::shared_ptr<models::Model>& model,
                                             const Group& group, int64_t total_steps);

}  // namespace shoal::cli
