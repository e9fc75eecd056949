#pragma once
// Dry run of communication: operations are only counted.

#include "shoal/group.h"

namespace shoal {

// Group of `ranks` ranks of which only rank 0 exists. Operations behave as if all ranks called them with the same
// tensors, except that sums are unchanged. Group::statistics() and recorded() work as usual.
Group dry_run_group(int ranks);

}  // namespace shoal
