#pragma once
// Units of the built-in models.

#include <string>

#include "shoal/wrap_policy.h"

namespace shoal::cli {

// Units of a built-in model: a transformer's blocks, other models' layers.
WrapPolicy unit_policy(const std::string& model);

}  // namespace shoal::cli
