#include "engine/graph_walk.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_set>

namespace shoal {

void mark_reachable(const std::vector<at::Tensor>& outputs,
                    const std::unordered_map<const torch::autograd::Node*, size_t>& nodes, std::vector<bool>& reached) {
  std::unordered_set<const torch::autograd::Node*> seen;
  std::vector<const torch::autograd::Node*> open;
  const auto visit = [&](const torch::autograd::Node* node) {
    if (node != nullptr && seen.insert(node).second) open.push_back(node);
  };
  for (const auto& output : outputs) visit(torch::autograd::impl::gradient_edge(output).function.get());
  while (!open.empty()) {
    const auto* node = open.back();
    open.pop_back();
    if (const auto found = nodes.find(node); found != nodes.end()) reached[found->second] = true;
    for (const auto& edge : node->next_edges()) visit(edge.function.get());
  }
}

}  // namespace shoal
