#pragma once
// A hook on a parameter that leaves the program's hooks alone.

#include <torch/csrc/autograd/function_hook.h>
#include <torch/types.h>

#include <functional>
#include <memory>

namespace shoal {

// Calls an exception-safe version of `act` (called_by_pytorch.h) before the node of a backward that it belongs to.
class BeforeNode : public torch::autograd::FunctionPreHook {
 public:
  explicit BeforeNode(std::function<void()> act) : act_(std::move(act)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override;

 private:
  std::function<void()> act_;
};

// Removes a hook from a list, if it is still there.
void erase_hook(std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>>& hooks,
                const torch::autograd::FunctionPreHook* hook);

// Calls `act` when a backward has computed the parameter's gradient, before it is accumulated. Ends with this object.
// Tensor::register_hook would remove the hooks that a program in Python has registered before.
class TensorHook {
 public:
  TensorHook(const at::Tensor& parameter, std::function<void()> act);
  ~TensorHook();
  TensorHook(const TensorHook&) = delete;
  TensorHook& operator=(const TensorHook&) = delete;
  // Puts it back if it was removed: PyTorch removes all hooks of a parameter where a program in Python registers its
  // first.
  void renew();

 private:
  void put();
  void remove();
  bool in_place() const;

  at::Tensor parameter_;
  std::shared_ptr<std::function<void()>> act_;
  unsigned number_ = 0;                                              // of C++'s hooks
  const torch::autograd::FunctionPreHook* beside_python_ = nullptr;  // in place of that
};

}  // namespace shoal
