#pragma once
// Options of loss scalers, as ranks compare them.

#include <optional>
#include <string>

#include "shoal/precision.h"

namespace shoal {

// One line of all options, for agree().
std::string describe(const std::optional<GradScalerOptions>& scaler);

}  // namespace shoal
