#pragma once
// Which buffers an evaluation goes by, where ranks have their own.

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "shoal/comm/group.h"

namespace shoal::cli {

// While it lives, these tensors hold what they are on the group's rank 0, whose model is saved; then they are this
// rank's own again. So what is saved is what was evaluated, also with the running means of batch norms. Constructor:
// collective; where it throws, nothing has changed.
class FirstRanksBuffers {
 public:
  FirstRanksBuffers(const std::vector<at::Tensor>& buffers, const Group& group);
  ~FirstRanksBuffers();
  FirstRanksBuffers(const FirstRanksBuffers&) = delete;
  FirstRanksBuffers& operator=(const FirstRanksBuffers&) = delete;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> own_;  // a tensor, and this rank's values
};

}  // namespace shoal::cli
