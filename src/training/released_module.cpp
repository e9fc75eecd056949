#include "training/released_module.h"

#include <torch/utils.h>

#include <algorithm>

#include "engine/changes/operator_watch.h"
#include "memory/views.h"
#include "module/walk.h"
#include "shoal/deferred_init.h"
#include "shoal/error.h"

namespace shoal {
namespace {

bool holds_something(const at::Tensor& grad, bool used) {
  const auto values = grad.is_sparse() ? grad._values() : grad;
  if (!is_watchable(values)) return values.numel() > 0 && values.count_nonzero().item<int64_t>() > 0;
  if (used) return false;
  try {
    return values.count_nonzero().item<int64_t>() > 0;  // a stand-in that was zeroed can be read
  } catch (const UsageError&) {
    return true;
  }
}

// In its own storage, or in a larger one that a strategy has made.
bool in_memory_of_strategy(const at::Tensor& parameter) {
  const auto bytes = static_cast<size_t>(parameter.numel()) * parameter.element_size();
  return is_watchable(parameter) || parameter.storage().nbytes() > bytes;
}

at::Tensor deferred_zeros(const at::Tensor& like, at::ScalarType dtype) {
  const auto sizes = like.sizes().vec();
  const auto strides = dense_strides(like);
  const auto options = like.options().dtype(dtype).requires_grad(false);
  const DeferredInit without_memory;
  return at::empty_strided(sizes, strides, options).zero_();
}

}  // namespace

std::string parameter_with_gradient(const torch::nn::Module& module, const std::vector<std::string>& ignored,
                                    bool used) {
  const torch::NoGradGuard no_grad;
  for (const auto& entry : walk(module, ignored).parameters) {
    const auto& grad = entry.tensor.grad();
    if (grad.defined() && holds_something(grad, used)) return entry.name;
  }
  return "";
}

void release_module(const torch::nn::Module& module, const std::vector<std::string>& ignored, const Precision& from,
                    const Precision& to) {
  const torch::NoGradGuard no_grad;
  const auto dtype_of = [&](const at::Tensor& tensor) {
    return tensor.scalar_type() == from.parameters ? to.parameters : tensor.scalar_type();
  };
  const auto convert = [&](const at::Tensor& tensor) {
    if (dtype_of(tensor) != tensor.scalar_type()) tensor.set_data(tensor.detach().to(dtype_of(tensor)));
  };
  const auto own = walk(module, ignored);
  const auto is_own = [&](const at::Tensor& tensor) {
    return std::any_of(own.parameters.begin(), own.parameters.end(),
                       [&](const NamedTensor& entry) { return entry.tensor.is_same(tensor); });
  };
  for (const auto& entry : walk(module, {}).parameters) {
    if (!is_own(entry.tensor)) convert(entry.tensor);
  }
  for (const auto& buffer : module.buffers()) convert(buffer);
  for (const auto& entry : own.parameters) {
    const auto& parameter = entry.tensor;
    at::Tensor(parameter).mutable_grad().reset();
    if (is_deferred(parameter)) continue;
    if (!in_memory_of_strategy(parameter) && dtype_of(parameter) == parameter.scalar_type()) continue;
    parameter.set_data(deferred_zeros(parameter, dtype_of(parameter)));
  }
}

}  // namespace shoal
