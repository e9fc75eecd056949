#pragma once
// Write assignments of a save, kept for the next one.

#include <memory>
#include <string>
#include <vector>

#include "checkpoint/saving/saver.h"
#include "checkpoint/saving/slice_plan.h"

namespace shoal {

// As long as all ranks have the same slices, the same orders hold: a save that is to return soon does not pay for them.
struct SaveOrders {
  std::string offer;                  // this rank's slices, for which they hold
  std::vector<size_t> writes;         // numbers of those that this rank writes
  std::vector<int64_t> copied_bytes;  // by rank: memory for copies of what it writes
  SlicePlan plan;                     // rank 0
};

// last: of the save before, or null. Collective; throws UsageError on every rank for contents that are wrong in
// themselves or do not make a whole.
std::shared_ptr<const SaveOrders> orders_for(const Group& group, const CheckpointContents& contents,
                                             std::shared_ptr<const SaveOrders> last);

}  // namespace shoal
