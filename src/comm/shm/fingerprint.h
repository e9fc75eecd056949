#pragma once
// What ranks compare before they touch anybody's data.

#include <optional>
#include <string>

#include "comm/shm/control_block.h"
#include "shoal/comm/call.h"

namespace shoal {

Fingerprint fingerprint_of(const Call& call, uint64_t number);
// The call in words, from a peer's fingerprint.
std::string describe(const Fingerprint& print);
// What the ranks called as operation `number` when that is not the same; a sentence that names two ranks (numbered by
// `world_ranks`) and both calls. Every rank that asks gets the same answer.
std::optional<std::string> find_disagreement(const ControlLayout& control, uint64_t number, int size,
                                             const std::vector<int>& world_ranks);

}  // namespace shoal
