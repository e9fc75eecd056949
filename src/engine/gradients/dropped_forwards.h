#pragma once
// Forwards whose results were dropped without a backward: a rank that drops one where the others do not is a step behind them.

#include <torch/csrc/autograd/function.h>

#include <c10/util/intrusive_ptr.h>
#include <algorithm>
#include <vector>

#include <torch/types.h>

namespace shoal {

class DroppedForwards {
 public:
  void note(const std::vector<at::Tensor>& outputs) {
    Nodes nodes;
    for (const auto& output : outputs) {
      if (!output.requires_grad()) continue;
      if (output.is_leaf()) return;  // not a result of this forward alone
      nodes.emplace_back(output.grad_fn());
    }
    if (nodes.empty()) return;
    constexpr size_t many = 64;  // without a step, as in an evaluation that does not disable gradients
    if (forwards_.size() >= many) {
      dropped_ = any();
      std::erase_if(forwards_, dropped);
    }
    forwards_.push_back(std::move(nodes));
  }
  // Whether no backward can pass through all of the forwards since clear() any more.
  bool any() const { return dropped_ || std::any_of(forwards_.begin(), forwards_.end(), dropped); }
  void clear() {
    forwards_.clear();
    dropped_ = false;
  }

 private:
  // The last operators of a forward. A graph that a backward may still use keeps them.
  using Nodes = std::vector<c10::weak_intrusive_ptr<torch::autograd::Node>>;
  static bool dropped(const Nodes& nodes) {
    return std::all_of(nodes.begin(), nodes.end(), [](const auto& node) { return node.expired(); });
  }

  std::vector<Nodes> forwards_;
  bool dropped_ = false;
};

}  // namespace shoal
