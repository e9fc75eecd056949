#pragma once
// State of reducers in checkpoints.

#include <string>
#include <vector>

#include "engine/checkpoint/source.h"
#include "engine/reducer/reducer.h"

namespace shoal {

// The bucket order, because on some transports sums of more than two ranks depend on it, the state of the communication
// hook, and the norm that a gradient consumer knows.
Carried carried_by(const std::vector<Reducer*>& reducers);

// Resumes from `past`; without state, hooks start afresh. So does a hook of another name, and one that has
// seen other parts of gradients. Returns what could not be restored, one sentence each. Collective: CheckpointError on
// every rank if `past` is not a result of carried_by().
std::vector<std::string> resume_from(const Group& group, const std::vector<Reducer*>& reducers, const Carried& past);

}  // namespace shoal
