#pragma once
// Being told when a parameter's gradient comes.

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/types.h>

#include <functional>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace shoal {

// On the thread that runs backward, each time a gradient comes: `arriving(i)` before autograd adds it to parameter i's
// grad(), `arrived(i)` after. Not in torch::autograd::grad, which adds nothing. Hooks of others on the same parameters
// keep working. The hooks go with this object.
//
// They hold whatever becomes of a parameter (load, to, set_data): autograd renews the node that accumulates a
// parameter's gradient when its dtype or device changes, but a tensor's own hooks stay. So a tensor hook, which runs
// before the node, sees to it that the node has ours.
class GradientHooks {
 public:
  using Told = std::function<void(size_t gradient)>;
  GradientHooks(const std::vector<at::Tensor>& parameters, Told arrived, Told arriving = {});
  ~GradientHooks();
  GradientHooks(const GradientHooks&) = delete;
  GradientHooks& operator=(const GradientHooks&) = delete;

  // The number of each parameter.
  const std::unordered_map<const c10::TensorImpl*, size_t>& numbers() const { return numbers_; }

 private:
  // Autograd itself holds accumulators weakly; the pointer's type differs between libtorch versions.
  using Accumulator = decltype(torch::autograd::impl::grad_accumulator(at::Tensor()));
  struct Entry {
    at::Tensor parameter;
    unsigned tensor_hook = 0;
    Accumulator accumulator{};
    const torch::autograd::FunctionPreHook* before = nullptr;
    uintptr_t after = 0;
  };

  void attach(size_t gradient, Accumulator accumulator);
  static void detach(Entry& entry);
  void attach_to_current_node(size_t gradient);

  Told arrived_;
  Told arriving_;
  std::mutex mutex_;  // backwards of several threads
  std::vector<Entry> entries_;
  std::unordered_map<const c10::TensorImpl*, size_t> numbers_;
};

}  // namespace shoal
