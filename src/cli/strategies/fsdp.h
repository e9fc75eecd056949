#pragma once
// `shoal train --strategy fsdp`, fsdp_grad_op, hybrid, hybrid_gossip.

#include "cli/strategies/strategies.h"
#include "shoal/wrap_policy.h"

namespace shoal::cli {

// Units of a built-in model: a transformer's blocks, other models' layers.
WrapPolicy unit_policy(const std::string& model);

// Throws UsageError where so many ranks of one host cannot train with --strategy hybrid_gossip.
void check_hybrid_gossip(const TrainOptions& options, int ranks);
// None for other strategies. Collective.
std::unique_ptr<Strategy> make_fsdp(const TrainOptions& options, const std::shared_ptr<models::Model>& model,
                                    const Group& group);

}  // namespace shoal::cli
