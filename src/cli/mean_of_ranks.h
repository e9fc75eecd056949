#pragma once
// The mean of the ranks' models, for evaluations and files.

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "shoal/comm/group.h"

namespace shoal::cli {

// While it lives, these floating-point tensors hold their mean over the group's ranks; then they are this rank's own
// again, to the last bit, and autograd and the wrappers have noticed nothing. Constructor: collective; where it throws,
// nothing has changed.
class MeanOfRanks {
 public:
  MeanOfRanks(const std::vector<at::Tensor>& tensors, const Group& group);
  ~MeanOfRanks();
  MeanOfRanks(const MeanOfRanks&) = delete;
  MeanOfRanks& operator=(const MeanOfRanks&) = delete;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> own_;  // a tensor, and this rank's values
};

}  // namespace shoal::cli
