#pragma once
// Error agreement for work with files, which may fail on one rank only.

#include <functional>
#include <string>

#include "shoal/group.h"

namespace shoal {

// Runs `work`, which must not communicate, on every rank. If it throws on some ranks, every rank throws the lowest
// one's error, with its rank if there are several: UsageError as such, anything else as CheckpointError. Collective.
// Costs one all-gather of 8 bytes on success.
void on_all_ranks(const Group& group, const std::string& subject, const std::function<void()>& work);

}  // namespace shoal
