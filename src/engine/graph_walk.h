#pragma once
// Which parameters a graph can reach.

#include <torch/types.h>

#include <unordered_map>
#include <vector>

namespace torch::autograd {
struct Node;
}

namespace shoal {

// Sets reached[i] for every parameter whose node (of `nodes`) can be reached from the graph of one of `outputs`.
void mark_reachable(const std::vector<at::Tensor>& outputs,
                    const std::unordered_map<const torch::autograd::Node*, size_t>& nodes, std::vector<bool>& reached);

}  // namespace shoal
