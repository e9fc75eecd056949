#pragma once
// Reduction of gradients through a communication hook.

#include <memory>
#include <string>
#include <vector>

#include "engine/reducer/gradient_reduction.h"

namespace shoal {

// Returns `reduction` itself without a hook. wrapper: named in errors. prefix: of parameter names, for a hook that
// serves several modules. UsageError if the hook does not support the reduction.
std::unique_ptr<GradientReduction> with_hook(std::unique_ptr<GradientReduction> reduction,
                                             std::shared_ptr<CommunicationHook> hook,
                                             const std::vector<Gradient>& gradients, const std::string& wrapper,
                                             const std::string& prefix = "");

}  // namespace shoal
