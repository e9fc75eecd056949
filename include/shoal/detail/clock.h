#pragma once
// Clock of all times and timeouts.

#include <chrono>

namespace shoal {

using Clock = std::chrono::steady_clock;

}  // namespace shoal
