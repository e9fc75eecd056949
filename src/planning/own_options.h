#pragma once
// Options for several strategies at once.

#include <string>
#include <vector>

#include "shoal/strategy.h"

namespace shoal {

// The options without those that `strategy`, one of `all`, does not have. UsageError, in the name of the function `of`,
// for an option that none of them has.
TrainingOptions own_options(const std::string& of, const std::string& strategy, const std::vector<std::string>& all,
                            TrainingOptions options);

}  // namespace shoal
