#include "engine/gradients/gradient_hooks.h"

#include <torch/csrc/autograd/utils/lambda_post_hook.h>

#include "base/called_by_pytorch.h"

namespace shoal {

using torch::autograd::variable_list;

GradientHooks::GradientHooks(const std::vector<at::Tensor>& parameters, Callback arrived, Callback arriving)
    : arrived_(std::move(arrived)), arriving_(std::move(arriving)), entries_(parameters.size()) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    auto& entry = entries_[i];
    entry.parameter = parameters[i];
    numbers_.emplace(parameters[i].unsafeGetTensorImpl(), i);
    attach(i, torch::autograd::impl::grad_accumulator(parameters[i]));
    entry.tensor_hook = std::make_unique<TensorHook>(parameters[i], [this, i] { attach_to_current_node(i); });
  }
}

GradientHooks::~GradientHooks() {
  for (auto& entry : entries_) detach(entry);
}

void GradientHooks::attach(size_t gradient, Accumulator accumulator) {
  auto& entry = entries_[gradient];
  detach(entry);
  entry.accumulator = std::move(accumulator);
  if (arriving_) {
    auto before = std::make_unique<BeforeNode>([this, gradient] { arriving_(gradient); });
    entry.before = before.get();
    entry.accumulator->add_pre_hook(std::move(before));
  }
  auto after = std::make_unique<torch::autograd::utils::LambdaPostHook>(
      [this, gradient](const variable_list& outputs, const variable_list&) -> variable_list {
        called_by_pytorch([&] { arrived_(gradient); });
        return outputs;
      });
  entry.after = entry.accumulator->add_post_hook(std::move(after));
}

void GradientHooks::detach(Entry& entry) {
  if (!entry.accumulator) return;
  entry.accumulator->del_post_hook(entry.after);
  erase_hook(entry.accumulator->pre_hooks(), entry.before);
  entry.accumulator = {};
}

void GradientHooks::renew() {
  put_back();
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < entries_.size(); ++i) {
    const auto& entry = entries_[i];
    if (torch::autograd::impl::try_get_grad_accumulator(entry.parameter) == entry.accumulator) continue;
    auto current = torch::autograd::impl::grad_accumulator(entry.parameter);
    if (current) attach(i, std::move(current));  // a frozen parameter has none
  }
}

void GradientHooks::put_back() {
  const std::lock_guard lock(mutex_);
  for (const auto& entry : entries_) {
    if (entry.parameter.requires_grad()) entry.tensor_hook->renew();
  }
}

// Only backward knows which node accumulates: a graph recorded before a parameter was replaced has the old one.
void GradientHooks::attach_to_current_node(size_t gradient) {
  auto node = torch::autograd::get_current_node();
  const std::lock_guard lock(mutex_);
  auto& entry = entries_[gradient];
  if (node == nullptr || node.get() == entry.accumulator.get()) return;
  const auto* accumulates = dynamic_cast<const torch::autograd::AccumulateGrad*>(node.get());
  if (accumulates == nullptr || !accumulates->variable.is_same(entry.parameter)) return;
  attach(gradient, std::move(node));
}

}  // namespace shoal
