#pragma once
// Use of parameters that the ranks of an elastic job have updated, before they have sent them to each other.

#include <string>

#include "shoal/group.h"

namespace shoal {

// What follows the parameter's name in the error.
inline constexpr const char* about_early_use =
    "has not come from the ranks that have updated it: where ranks share no memory, those of an elastic job send each "
    "other their shards behind the second function of Elastic::step(). Use parameters there before the optimizer's "
    "step(), in the first function, or between two steps";

// Returns when all ranks have come here; if some of them have such an error, throws that of the first one on all ranks
// (UsageError). error: this rank's; empty: none. Collective.
void meet_without_early_use(const Group& group, const std::string& error, const Label& label);

}  // namespace shoal
