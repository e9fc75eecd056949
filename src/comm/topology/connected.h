#pragma once
// Proof that all ranks' values reach all ranks.

#include <string>
#include <vector>

#include "shoal/topology.h"

namespace shoal {

// UsageError, which begins with `where`, if repeating these rounds never brings some rank's values to another rank, or
// only permutes values without mixing them.
void prove_connected(const std::vector<MixingRound>& rounds, const std::string& where);

}  // namespace shoal
