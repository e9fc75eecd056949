#include "module/deferred_shapes.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/enum_tag.h>
#include <fmt/format.h>
#include <torch/utils.h>

#include <algorithm>
#include <cstdlib>
#include <new>

#include "shoal/error.h"

namespace shoal {
namespace {

template <class Replace>
OperatorValues run_with(const c10::OperatorHandle& op, const OperatorValues& arguments, std::optional<int> device,
                        c10::Device on, const Replace& replace) {
  torch::jit::Stack stack;
  for (const auto& value : arguments) stack.push_back(with_tensors(value, replace));
  if (device) stack[*device] = on;
  op.callBoxed(&stack);
  return stack;
}

OperatorValues on_meta(const c10::OperatorHandle& op, const OperatorValues& arguments, std::optional<int> device) {
  const c10::Device meta(c10::DeviceType::Meta);
  return run_with(op, arguments, device, meta, [&](const at::Tensor& tensor) {
    return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(meta).requires_grad(false));
  });
}

// Zeros on the CPU whose pages take no memory as long as they are only read.
at::Tensor untouched_zeros(const at::Tensor& tensor) {
  const auto bytes = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.dtype().itemsize());
  void* memory = std::calloc(std::max<size_t>(bytes, 1), 1);
  if (memory == nullptr) throw std::bad_alloc();
  return at::from_blob(memory, tensor.sizes(), tensor.strides(), std::free,
                       tensor.options().device(c10::DeviceType::CPU).requires_grad(false));
}

OperatorValues on_zeros(const c10::OperatorHandle& op, const OperatorValues& arguments, std::optional<int> device) {
  const torch::NoGradGuard no_grad;
  return run_with(op, arguments, device, c10::Device(c10::DeviceType::CPU), [](const at::Tensor& tensor) {
    return tensor.is_cpu() && !DeferredTape::instance().deferred(tensor) ? tensor : untouched_zeros(tensor);
  });
}

bool any_tensor(const OperatorValues& values) {
  bool any = false;
  for (const auto& value : values) for_tensors(value, [&](const at::Tensor&) { any = true; });
  return any;
}

bool all_strided(const OperatorValues& values) {
  bool all = true;
  for (const auto& value : values) for_tensors(value, [&](const at::Tensor& tensor) { all &= tensor.has_storage(); });
  return all;
}

// Whether running the operator on other values may give other shapes, or changes what later operators give.
bool needs_values(const c10::OperatorHandle& op) {
  return op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output) ||
         op.hasTag(at::Tag::nondeterministic_seeded);
}

}  // namespace

std::optional<OperatorValues> shapes_of_results(const c10::OperatorHandle& op, const OperatorValues& arguments,
                                                std::optional<int> device) {
  try {
    return on_meta(op, arguments, device);
  } catch (const c10::NotImplementedError&) {
    if (!any_tensor(arguments)) return std::nullopt;
  }
  // Many operators have a kernel for the meta device in PyTorch's Python part only.
  if (!needs_values(op)) {
    try {
      auto shapes = on_zeros(op, arguments, device);
      if (all_strided(shapes)) return shapes;
    } catch (const c10::Error&) {  // NOLINT(bugprone-empty-catch): it does not take zeros
    }
  }
  throw UsageError(
      fmt::format("DeferredInit: {} cannot be recorded, because PyTorch does not know the shape of its result before "
                  "it runs; call it after materialize(), or outside the scope",
                  op.schema().name()));
}

}  // namespace shoal
