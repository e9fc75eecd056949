#pragma once
// Parameters that an autograd graph reaches.

#include <torch/types.h>

#include <unordered_map>
#include <vector>

namespace shoal {

// Sets reached[numbers[p]] for every parameter p into whose gradient the graph of one of `outputs` accumulates.
void mark_reachable(const std::vector<at::Tensor>& outputs,
                    const std::unordered_map<const c10::TensorImpl*, size_t>& numbers, std::vector<bool>& reached);

}  // namespace shoal
