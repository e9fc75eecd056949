#pragma once
// Do all ranks' values reach all ranks?

#include <string>
#include <vector>

#include "shoal/topology.h"

namespace shoal {

// Throws UsageError, beginning with `where`, when repeating these rounds never brings some rank's values to some other
// rank, or only moves values about without ever mixing them.
void prove_connected(const std::vector<MixingRound>& rounds, const std::string& where);

}  // namespace shoal
