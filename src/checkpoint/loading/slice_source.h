#pragma once
// Interface between readers of a checkpoint and what holds its bytes: files, or the memory of ranks.

#include <string>

#include "checkpoint/format/index.h"

namespace shoal {

class SliceSource {
 public:
  virtual ~SliceSource() = default;
  // For errors: "runs/a/step-4".
  virtual std::string name() const = 0;
  virtual const CheckpointIndex& index() const = 0;
  // Reads `range` of the tensor's elements, in the tensor's own order, to `to`. tensor: one of index().
  virtual void read(const StoredTensor& tensor, const Range& range, char* to) = 0;
};

}  // namespace shoal
