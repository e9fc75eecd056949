#pragma once
// The error of whatever saves or loads.

#include "shoal/base/error.h"

namespace shoal {

// A checkpoint could not be written or read: no space, no permission, a damaged file, another job that saves to the
// same place. Names the file and the reason. Where ranks save together it is thrown on every rank and names the rank at
// fault; the older checkpoints are as before, the ranks are in step and may go on training.
class CheckpointError : public Error {
 public:
  using Error::Error;
};

}  // namespace shoal
