#pragma once
// A strategy's exchange whose sums a communication hook takes over.

#include <memory>
#include <string>
#include <vector>

#include "engine/reducer/exchange.h"

namespace shoal {

// `exchange` as it is without a hook. wrapper: for errors. prefix: of the parameters' names, where a hook sees several
// modules. UsageError where the hook cannot give sums to those who need them; DisagreeError where ranks have different
// hooks. Collective with a hook.
std::unique_ptr<Exchange> with_hook(std::unique_ptr<Exchange> exchange, std::shared_ptr<CommunicationHook> hook,
                                    const std::vector<Gradient>& gradients, const std::string& wrapper,
                                    const std::string& prefix = "");

}  // namespace shoal
