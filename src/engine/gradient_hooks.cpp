#include "engine/gradient_hooks.h"

#include <torch/csrc/autograd/utils/lambda_post_hook.h>

namespace shoal {

GradientHooks::GradientHooks(const std::vector<at::Tensor>& parameters, const std::function<void(size_t)>& arrived) {
  using torch::autograd::variable_list;
  for (size_t i = 0; i < parameters.size(); ++i) {
    auto accumulator = torch::autograd::impl::grad_accumulator(parameters[i]);
    auto hook = std::make_unique<torch::autograd::utils::LambdaPostHook>(
        [arrived, i](const variable_list& outputs, const variable_list&) -> variable_list {
          arrived(i);
          return outputs;
        });
    const auto key = accumulator->add_post_hook(std::move(hook));
    nodes_.emplace(accumulator.get(), i);
    entries_.push_back({std::move(accumulator), key});
  }
}

GradientHooks::~GradientHooks() {
  for (auto& entry : entries_) entry.accumulator->del_post_hook(entry.key);
}

}  // namespace shoal
