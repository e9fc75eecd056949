#pragma once
// One model of all ranks, for evaluations and files, where ranks have values of their own.

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "shoal/group.h"

namespace shoal {

// While it lives, these tensors hold the same on all ranks of the group; then they are this rank's own again, to the
// last bit, and autograd and the wrappers have noticed nothing. Constructor: collective; where it throws, nothing has
// changed.
class CommonValues {
 public:
  enum class Of {
    mean,       // over the ranks; of floating-point tensors, the others stay each rank's own
    first_rank  // what rank 0 has, whose model is saved
  };

  CommonValues(Of of, const std::vector<at::Tensor>& tensors, const Group& group);
  ~CommonValues();
  CommonValues(const CommonValues&) = delete;
  CommonValues& operator=(const CommonValues&) = delete;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> own_;  // a tensor, and this rank's values
};

}  // namespace shoal
