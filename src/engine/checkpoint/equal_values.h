#pragma once
// Values that all ranks hold and a checkpoint has once.

#include "engine/checkpoint/source.h"

namespace shoal {

// DisagreeError, which names the parameter, if ranks hold other values of those that the view calls equal: the
// checkpoint would have some of one rank and some of another. Looks at 256 elements of each, and lets pass what differs
// by rounding. Collective where a share is `everywhere`.
void require_equal_values(const CheckpointView& view, const Group& group);

}  // namespace shoal
