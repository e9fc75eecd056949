#pragma once
// Work with files fails on one rank; the error belongs to all of them.

#include <functional>
#include <string>

#include "shoal/group.h"

namespace shoal {

// Runs `work`, which does not communicate, on every rank. Where it throws on some rank, every rank throws the first
// one's error, with its number where there are several: UsageError as such, anything else as CheckpointError.
// Collective. Costs one all-gather of 8 bytes when all is well.
void on_all_ranks(const Group& group, const std::string& subject, const std::function<void()>& work);

}  // namespace shoal
