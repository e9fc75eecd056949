#pragma once
// State that reducers carry from step to step, for checkpoints.

#include <vector>

#include "engine/checkpoint/source.h"
#include "engine/reducer/reducer.h"

namespace shoal {

// The order of gradients that buckets follow, since sums of more than two ranks depend on it on some transports, and
// what a communication hook remembers.
Carried carried_by(const std::vector<Reducer*>& reducers);

// They go on from there; from nothing, hooks begin anew. A hook of another name does, too, with a warning. Collective:
// CheckpointError on every rank for what carried_by() does not give.
void go_on_from(const Group& group, const std::vector<Reducer*>& reducers, const Carried& past);

}  // namespace shoal
