#pragma once
// Being told when a parameter's gradient has arrived.

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/types.h>

#include <functional>
#include <unordered_map>
#include <vector>

namespace shoal {

// Calls `arrived(i)` after autograd has added a gradient to parameter i's grad(), on the thread that runs backward,
// each time it happens. Hooks of others on the same parameters keep working. The hooks go with this object.
class GradientHooks {
 public:
  GradientHooks(const std::vector<at::Tensor>& parameters, const std::function<void(size_t)>& arrived);
  ~GradientHooks();
  GradientHooks(const GradientHooks&) = delete;
  GradientHooks& operator=(const GradientHooks&) = delete;

  // The graph's end point of each parameter, for recognising it in a walk.
  const std::unordered_map<const torch::autograd::Node*, size_t>& nodes() const { return nodes_; }

 private:
  // Autograd itself holds accumulators weakly; the pointer's type differs between libtorch versions.
  using Accumulator = decltype(torch::autograd::impl::grad_accumulator(at::Tensor()));
  struct Entry {
    Accumulator accumulator;
    uintptr_t key;
  };
  std::vector<Entry> entries_;
  std::unordered_map<const torch::autograd::Node*, size_t> nodes_;
};

}  // namespace shoal
