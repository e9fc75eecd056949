#include "comm/backend/operands.h"

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "shoal/error.h"

namespace shoal {
namespace {

// Work may end on another thread, which is not in the InferenceMode that the tensor was made in.
std::function<void()> copying(const at::Tensor& copy, const at::Tensor& tensor) {
  return [copy, target = tensor.detach()] {
    const c10::InferenceMode mode(target.is_inference());
    const c10::NoGradGuard no_grad;
    target.copy_(copy);
  };
}

}  // namespace

void Operands::refuse(const std::string& why) const {
  throw UsageError(fmt::format("{}: {}", operation_, why));
}

void Operands::check(const at::Tensor& tensor) const {
  if (!tensor.defined()) refuse("a tensor is undefined");
  if (!tensor.device().is_cpu()) {
    refuse(
        fmt::format("the backend shoal communicates CPU tensors, but a tensor is on {}: move it to the CPU, or use "
                    "init_process_group(\"cpu:shoal,cuda:nccl\")",
                    tensor.device().str()));
  }
  if (tensor.layout() != at::kStrided) {
    refuse(c10::str("tensors of layout ", tensor.layout(),
                    " are not supported; use a dense tensor (all_reduce also takes sparse COO)"));
  }
}

bool Operands::fits(const at::Tensor& tensor) const {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

at::Tensor Operands::input(const at::Tensor& tensor) {
  check(tensor);
  kept_.push_back(tensor);
  const c10::NoGradGuard no_grad;
  // An alias without a Python object, because transports release tensors under their lock.
  return fits(tensor) ? tensor.detach() : tensor.detach().resolve_conj().resolve_neg().contiguous();
}

at::Tensor Operands::output(const at::Tensor& tensor) {
  check(tensor);
  kept_.push_back(tensor);
  const c10::NoGradGuard no_grad;
  if (fits(tensor)) return tensor.detach();
  const auto copy = at::empty(tensor.sizes(), tensor.options().requires_grad(false));
  finish_.push_back(copying(copy, tensor));
  return copy;
}

at::Tensor Operands::in_out(const at::Tensor& tensor) {
  const auto copy = input(tensor);
  if (!fits(tensor)) finish_.push_back(copying(copy, tensor));
  return copy;
}

void Operands::divide_when_done(const at::Tensor& sum, int64_t divisor, const at::Tensor& result) {
  finish_.insert(finish_.begin(), [sum, divisor, result = result.detach()] {
    const c10::InferenceMode mode(result.is_inference());
    const c10::NoGradGuard no_grad;
    at::Tensor(result).copy_(sum.div(divisor, "trunc"));
  });
}

Tensors Operands::inputs(const Tensors& tensors) {
  Tensors list;
  for (const auto& tensor : tensors) list.push_back(input(tensor));
  return list;
}

Tensors Operands::outputs(const Tensors& tensors) {
  Tensors list;
  for (const auto& tensor : tensors) list.push_back(output(tensor));
  return list;
}

void Operands::require_one(const Tensors& tensors) const {
  if (tensors.size() != 1) refuse(fmt::format("takes one tensor, not {}", tensors.size()));
}

void Operands::require_one_per_rank(const Tensors& tensors, int ranks) const {
  if (tensors.size() != static_cast<size_t>(ranks)) {
    refuse(
        fmt::format("the list has {} tensors; it needs one for each of the group's {} ranks", tensors.size(), ranks));
  }
}

void Operands::require_same_shape(const at::Tensor& part, const at::Tensor& other) const {
  if (part.sizes() == other.sizes()) return;
  refuse(fmt::format("this rank's tensor of the list has shape [{}], but its own tensor has shape [{}]",
                     fmt::join(part.sizes(), ", "), fmt::join(other.sizes(), ", ")));
}

Tensors as_real(Tensors tensors) {
  for (auto& tensor : tensors) {
    if (tensor.is_complex()) tensor = at::view_as_real(tensor);
  }
  return tensors;
}

bool of_one_integer_type(const Tensors& inputs, const Tensors& outputs) {
  const auto dtype = inputs[0].scalar_type();
  const auto has_it = [dtype](const at::Tensor& tensor) { return tensor.scalar_type() == dtype; };
  return at::isIntegralType(dtype, /*includeBool=*/false) && std::all_of(inputs.begin(), inputs.end(), has_it) &&
         std::all_of(outputs.begin(), outputs.end(), has_it);
}

Tensors as_int64(Tensors tensors) {
  for (auto& tensor : tensors) {
    if (tensor.element_size() < 8) tensor = tensor.to(at::kLong);
  }
  return tensors;
}

}  // namespace shoal
