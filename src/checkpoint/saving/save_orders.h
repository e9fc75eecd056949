#pragma once
// Write assignments of a save, kept for the next one.

#include <memory>
#include <string>
#include <vector>

#include "checkpoint/saving/saver.h"
#include "checkpoint/saving/slice_plan.h"

namespace shoal {

// Valid while all ranks have the same slices, so that an asynchronous save need not plan again.
struct SaveOrders {
  std::string offer;                  // description of this rank's slices, for which the orders hold
  std::vector<size_t> writes;         // indices of the slices that this rank writes
  std::vector<int64_t> copied_bytes;  // by rank: memory for copies of what it writes
  SlicePlan plan;                     // on rank 0
};

// last: assignments of the previous save, or null. Collective; UsageError on every rank for slices that are invalid or
// do not make up whole tensors.
std::shared_ptr<const SaveOrders> orders_for(const Group& group, const CheckpointContents& contents,
                                             std::shared_ptr<const SaveOrders> last);

}  // namespace shoal
