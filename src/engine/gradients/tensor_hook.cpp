#include "engine/gradients/tensor_hook.h"

#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <string_view>
#include <typeinfo>
#include <utility>
#include <vector>

#include "base/called_by_pytorch.h"

namespace shoal {
namespace {

// libtorch does not export the type of C++'s hooks.
bool has_only_hooks_of_python(const at::Tensor& parameter) {
  const auto& hooks = torch::autograd::impl::hooks(parameter);
  return !hooks.empty() && std::none_of(hooks.begin(), hooks.end(), [](const auto& hook) {
    const auto& one = *hook;
    return std::string_view(typeid(one).name()).find("CppFunctionTensorPreHook") != std::string_view::npos;
  });
}

// remove_hook() leaves an empty entry behind, which every backward would visit; so the entries are removed, too.
void remove_hook_of_cpp(const at::Tensor& parameter, unsigned number) {
  parameter.remove_hook(number);
  auto& list = *torch::autograd::impl::materialize_autograd_meta(parameter)->cpp_hooks_list_;
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

TensorHook::TensorHook(const at::Tensor& parameter, std::function<void()> act) : parameter_(parameter) {
  if (!has_only_hooks_of_python(parameter)) {
    number_ = parameter.register_hook([act = std::move(act)](const at::Tensor&) { called_by_pytorch(act); });
    return;
  }
  auto before = std::make_unique<BeforeNode>(std::move(act));
  beside_python_ = before.get();
  torch::autograd::impl::hooks(parameter).push_back(std::move(before));
}

TensorHook::~TensorHook() {
  if (beside_python_ == nullptr) {
    remove_hook_of_cpp(parameter_, number_);
  } else {
    erase_hook(torch::autograd::impl::hooks(parameter_), beside_python_);
  }
}

}  // namespace shoal
