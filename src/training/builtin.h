#pragma once
// The library's own strategies, in the order of the help text.

#include <vector>

#include "shoal/strategy.h"

namespace shoal {

std::vector<Strategy> ddp_strategies();
std::vector<Strategy> zero_strategies();
std::vector<Strategy> megatron_strategies();
std::vector<Strategy> fsdp_strategies();
std::vector<Strategy> local_update_strategies();
std::vector<Strategy> decentralized_strategies();
std::vector<Strategy> hybrid_gossip_strategies();
std::vector<Strategy> strategies_without_exchange();

}  // namespace shoal
