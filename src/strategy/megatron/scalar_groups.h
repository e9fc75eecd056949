#pragma once
// Ranks that agree on a step's scalars: the norm of all gradients, inf and counts, and with them the loss scale.

#include <optional>
#include <vector>

#include "shoal/group.h"

namespace shoal {

// Groups over which a scalar is added up, one after the other, so that each shard of the model counts once. UsageError
// when model_parallel has some of the data-parallel ranks beside this one, but not all.
std::vector<Group> scalar_groups(const Group& data_parallel, const std::optional<Group>& model_parallel);

// UsageError unless this rank is the only one of `data_parallel` in the group that holds its replica of the model.
void require_own_replica(const Group& data_parallel, const Group& model_parallel);

// Whether these scalars cover all ranks of `sharers`.
bool cover(const std::vector<Group>& scalars, const Group& sharers);

// Whether the ranks of `group` are the ones that count parameters which all of `sharers` hold: those of its lowest
// rank.
bool counts(const Group& group, const Group& sharers);

}  // namespace shoal
