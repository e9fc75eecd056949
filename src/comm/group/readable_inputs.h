#pragma once
// Inputs of a call as transports need them: these move memory, not values, and write outputs while inputs are still
// read.

#include "shoal/detail/call.h"

namespace shoal {

// Copies inputs that would be wrong as they are: those with a conjugate or negative bit, whose values are not what is
// in memory, and those that share memory with an output, unless they are this rank's own part at its own place, which
// transports leave there. UsageError for a tensor with such a bit to which the call would write.
void make_readable(Call& call, int rank, int size);

}  // namespace shoal
