#pragma once
// Reduction of gradients whose sums a communication hook takes over.

#include <memory>
#include <string>
#include <vector>

#include "engine/reducer/gradient_reduction.h"

namespace shoal {

// `reduction` as it is without a hook. wrapper: for errors. prefix: of the parameters' names, where a hook sees several
// modules. UsageError where the hook cannot give sums to those who need them; DisagreeError where ranks have different
// hooks. Collective with a hook.
std::unique_ptr<GradientReduction> with_hook(std::unique_ptr<GradientReduction> reduction,
                                             std::shared_ptr<CommunicationHook> hook,
                                             const std::vector<Gradient>& gradients, const std::string& wrapper,
                                             const std::string& prefix = "");

}  // namespace shoal
