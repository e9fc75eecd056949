#include "engine/gradients/tensor_hook.h"

#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "base/called_by_pytorch.h"

namespace shoal {
namespace {

const std::shared_ptr<torch::autograd::hooks_list>& hooks_of_cpp(const at::Tensor& parameter) {
  return torch::autograd::impl::materialize_autograd_meta(parameter)->cpp_hooks_list_;
}

// Whether backward calls the hooks of this list. Python's first hook takes it out of the parameter's hooks for good.
bool is_called(const std::shared_ptr<torch::autograd::hooks_list>& list) {
  return list && list.use_count() > 1;
}

// remove_hook() leaves an empty entry behind, which every backward would visit; so the entries are removed, too.
void remove_hook_of_cpp(const at::Tensor& parameter, unsigned number) {
  parameter.remove_hook(number);
  auto& list = *hooks_of_cpp(parameter);
  while (!list.empty() && !list.back()) list.pop_back();
}

}  // namespace

torch::autograd::variable_list BeforeNode::operator()(const torch::autograd::variable_list& gradients) {
  called_by_pytorch(act_);
  return gradients;
}

void erase_hook(std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>>& hooks,
                const torch::autograd::FunctionPreHook* hook) {
  std::erase_if(hooks, [hook](const auto& one) { return one.get() == hook; });
}

TensorHook::TensorHook(const at::Tensor& parameter, std::function<void()> act)
    : parameter_(parameter), act_(std::make_shared<std::function<void()>>(std::move(act))) {
  put();
}

TensorHook::~TensorHook() {
  remove();
}

void TensorHook::renew() {
  if (in_place()) return;
  remove();
  put();
}

// A first hook of C++ would remove Python's, and is never called once Python's has removed the list.
void TensorHook::put() {
  auto& hooks = torch::autograd::impl::hooks(parameter_);
  const auto& list = hooks_of_cpp(parameter_);
  if (list ? is_called(list) : hooks.empty()) {
    number_ = parameter_.register_hook([act = act_](const at::Tensor&) { called_by_pytorch(*act); });
    return;
  }
  auto before = std::make_unique<BeforeNode>([act = act_] { (*act)(); });
  beside_python_ = before.get();
  hooks.push_back(std::move(before));
}

bool TensorHook::in_place() const {
  return beside_python_ == nullptr ? is_called(hooks_of_cpp(parameter_)) : act_.use_count() > 1;
}

void TensorHook::remove() {
  if (beside_python_ == nullptr) return remove_hook_of_cpp(parameter_, number_);
  if (in_place()) erase_hook(torch::autograd::impl::hooks(parameter_), beside_python_);
  beside_python_ = nullptr;
}

}  // namespace shoal
