#pragma once
// Values that all ranks hold and a checkpoint has once.

#include "engine/checkpoint/source.h"

namespace shoal {

// DisagreeError, which names the tensor, if ranks hold other values of parameters or optimizer state that the view calls
// equal: the checkpoint would have some of one rank and some of another. Looks at 256 elements of each tensor, and lets
// pass what differs by a ten thousandth of the largest, as after different processors' rounding. Collective where a share is
// `everywhere`.
void require_equal_values(const CheckpointView& view, const Group& group);

}  // namespace shoal
