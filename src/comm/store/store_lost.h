#pragma once
// Error for a store whose process has ended: its connection is lost for good, unlike that of one that does not answer.

#include "shoal/error.h"

namespace shoal {

class StoreLost : public CommError {
 public:
  using CommError::CommError;
};

}  // namespace shoal
