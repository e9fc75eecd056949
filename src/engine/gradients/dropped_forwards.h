#pragma once
// Forwards whose results were dropped without a backward: a rank that drops one where the others do not is a step
// behind them.

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

#include <torch/types.h>

namespace shoal {

// Of the forwards since clear(). A backward may also leave out a forward that is not dropped, and results may live on
// for reasons that differ between ranks; so a rank is behind another only if it has dropped a forward and the other has
// used all of its own.
class DroppedForwards {
 public:
  // Returns what to set to true when a backward reaches the outputs; nullptr: they are not of this forward alone.
  std::shared_ptr<bool> note(const std::vector<at::Tensor>& outputs) {
    Forward forward;
    for (const auto& output : outputs) {
      if (!output.requires_grad()) continue;
      if (output.is_leaf()) return nullptr;
      forward.last_operators.emplace_back(output.grad_fn());
    }
    if (forward.last_operators.empty()) return nullptr;
    constexpr size_t many = 64;  // without a step, as in an evaluation that does not disable gradients
    if (forwards_.size() >= many) {
      dropped_ = any_dropped();
      std::erase_if(forwards_, [](const auto& one) { return *one.reached || one.is_dropped(); });
    }
    forwards_.push_back(forward);
    return forward.reached;
  }
  bool any_dropped() const {
    return dropped_ || std::any_of(forwards_.begin(), forwards_.end(), std::mem_fn(&Forward::is_dropped));
  }
  bool all_reached() const {
    return !dropped_ && std::all_of(forwards_.begin(), forwards_.end(), [](const auto& one) { return *one.reached; });
  }
  void clear() {
    forwards_.clear();
    dropped_ = false;
  }

 private:
  struct Forward {
    // A graph that a backward may still use keeps them.
    std::vector<c10::weak_intrusive_ptr<torch::autograd::Node>> last_operators{};
    std::shared_ptr<bool> reached = std::make_shared<bool>(false);

    bool is_dropped() const {
      return !*reached &&
             std::all_of(last_operators.begin(), last_operators.end(), [](const auto& node) { return node.expired(); });
    }
  };

  std::vector<Forward> forwards_;
  bool dropped_ = false;
};

}  // namespace shoal
