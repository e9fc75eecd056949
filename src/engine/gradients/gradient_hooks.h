#pragma once
// Hooks that run when a parameter's gradient arrives.

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/types.h>

#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "engine/gradients/tensor_hook.h"

namespace shoal {

// Calls `arriving(i)` before autograd adds a gradient to parameter i's grad(), and `arrived(i)` after, on the thread
// that runs backward. Not called by torch::autograd::grad, which adds nothing. Other hooks on the same parameters keep
// working. The hooks are removed with this object.
//
// The hooks survive load, to and set_data: autograd renews the node that accumulates a gradient when the parameter's
// dtype or device changes, but a tensor's own hooks stay. A tensor hook, which runs before the node, therefore attaches
// our hooks to the current node.
class GradientHooks {
 public:
  using Callback = std::function<void(size_t gradient)>;
  GradientHooks(const std::vector<at::Tensor>& parameters, Callback arrived, Callback arriving = {});
  ~GradientHooks();
  GradientHooks(const GradientHooks&) = delete;
  GradientHooks& operator=(const GradientHooks&) = delete;

  // Restores hooks that the program has removed, before a forward. Without the tensor's, no backward would find a new
  // node.
  void renew();
  // The tensors' hooks alone, also within a backward.
  void put_back();

  // Index of each parameter.
  const std::unordered_map<const c10::TensorImpl*, size_t>& numbers() const { return numbers_; }

 private:
  // Owning, because autograd holds accumulators weakly; the pointer's type differs between libtorch versions.
  using Accumulator = decltype(torch::autograd::impl::grad_accumulator(at::Tensor()));
  struct Entry {
    at::Tensor parameter;
    std::unique_ptr<TensorHook> tensor_hook{};
    Accumulator accumulator{};
    const torch::autograd::FunctionPreHook* before = nullptr;
    uintptr_t after = 0;
  };

  void attach(size_t gradient, Accumulator accumulator);
  static void detach(Entry& entry);
  void attach_to_current_node(size_t gradient);

  Callback arrived_;
  Callback arriving_;
  std::mutex mutex_;  // backwards may run on several threads
  std::vector<Entry> entries_;
  std::unordered_map<const c10::TensorImpl*, size_t> numbers_;
};

}  // namespace shoal
