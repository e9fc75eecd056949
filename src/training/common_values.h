#pragma once
// Values that all ranks have in common, for evaluations and files, while ranks have values of their own.

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "shoal/group.h"

namespace shoal {

// While this object lives, the tensors hold the same values on all ranks of the group; then this rank's own values are
// restored bit for bit, unnoticed by autograd and the wrappers. The constructor is collective; if it throws, nothing
// has changed.
class CommonValues {
 public:
  enum class Of {
    mean,       // mean over the ranks for floating-point tensors; others keep each rank's own values
    first_rank  // rank 0's values, whose model is saved
  };

  CommonValues(Of of, const std::vector<at::Tensor>& tensors, const Group& group);
  ~CommonValues();
  CommonValues(const CommonValues&) = delete;
  CommonValues& operator=(const CommonValues&) = delete;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> own_;  // tensors, and this rank's values
};

}  // namespace shoal
