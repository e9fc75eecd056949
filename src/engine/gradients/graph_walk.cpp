#include "engine/gradients/graph_walk.h"

#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <unordered_set>

namespace shoal {

void mark_reachable(const std::vector<at::Tensor>& outputs,
                    const std::unordered_map<const c10::TensorImpl*, size_t>& numbers, std::vector<bool>& reached) {
  std::unordered_set<const torch::autograd::Node*> seen;
  std::vector<const torch::autograd::Node*> open;
  // Identified by its parameter, because autograd may renew the node.
  const auto look = [&](const torch::autograd::Node* node) {
    const auto* end = dynamic_cast<const torch::autograd::AccumulateGrad*>(node);
    if (end == nullptr) return;
    const auto found = numbers.find(end->variable.unsafeGetTensorImpl());
    if (found != numbers.end()) reached[found->second] = true;
  };
  const auto visit = [&](const torch::autograd::Node* node) {
    if (node != nullptr && seen.insert(node).second) open.push_back(node);
  };
  for (const auto& output : outputs) visit(torch::autograd::impl::gradient_edge(output).function.get());
  while (!open.empty()) {
    const auto* node = open.back();
    open.pop_back();
    if (node->num_outputs() == 0) look(node);
    for (const auto& edge : node->next_edges()) visit(edge.function.get());
  }
}

}  // namespace shoal
