#pragma once
// Operations that only count.

#include "shoal/group.h"

namespace shoal {

// Rank 0 of `ranks` that are not there: as if all of them called what this process calls, with the same tensors, except
// that sums stay as they are. Group::statistics() and recorded() work as ever.
Group dry_run_group(int ranks);

}  // namespace shoal
