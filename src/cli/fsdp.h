#pragma once
// `shoal train --strategy fsdp`, fsdp_grad_op, hybrid, hybrid_gossip.

#include "cli/strategies.h"
#include "shoal/module/wrap_policy.h"

namespace shoal::cli {

// Units of a built-in model: a transformer's blocks, other models' layers.
WrapPolicy unit_policy(const std::string& model);

// None for other strategies. Collective.
std::unique_ptr<Strategy> make_fsdp(const TrainOptions& options, const std::shared_ptr<models::Model>& model,
                                    const Group& group);

}  // namespace shoal::cli
