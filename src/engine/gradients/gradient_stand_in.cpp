#include "engine/gradients/gradient_stand_in.h"

#include <fmt/format.h>
#include <torch/utils.h>

#include <atomic>

#include "memory/views.h"
#include "shoal/error.h"

namespace shoal {
namespace {

std::atomic<bool> passes_to = false;

}  // namespace

void let_stand_ins_pass_to(bool pass) {
  passes_to = pass;
}

GradientStandIn::GradientStandIn(const at::Tensor& parameter, std::string about) : about_(std::move(about)) {
  const torch::NoGradGuard no_grad;
  c10::Storage storage(c10::Storage::use_byte_size_t(), parameter.numel() * parameter.element_size(),
                       c10::DataPtr(nullptr, parameter.device()), /*allocator=*/nullptr, /*resizable=*/false);
  auto shaped = at::empty({0}, parameter.options().requires_grad(false));
  shaped.set_(storage, 0, parameter.sizes(), dense_strides(parameter));
  tensor_ = watchable(shaped);
  auto* memory = storage.unsafeGetStorageImpl();
  memory->release_data_and_set_meta_custom_data_ptr_error_msg_("data_ptr() takes " + about_);
  watch(memory, *this);
}

GradientStandIn::~GradientStandIn() {
  unwatch(tensor_.storage().unsafeGetStorageImpl(), *this);
}

bool GradientStandIn::is(const at::Tensor& tensor) const {
  return !real_ && same_storage(tensor, tensor_);
}

void GradientStandIn::begin_use(std::string_view op, std::span<c10::StorageImpl* const>) {
  if (zeroed_) {
    if (!real_) become_real();
    return;
  }
  if (op == "aten::to" && passes_to) return;  // an alias; a conversion is aten::_to_copy
  const auto* advice = op == "aten::_to_copy" ? " (to convert the module, call zero_grad() before)" : "";
  throw UsageError(fmt::format("{} takes {}{}", op, about_, advice));
}

void GradientStandIn::become_real() {
  const torch::NoGradGuard no_grad;
  auto* storage = tensor_.storage().unsafeGetStorageImpl();
  auto* zeroes =
      new at::Tensor(at::zeros({static_cast<int64_t>(storage->nbytes())}, tensor_.options().dtype(at::kByte)));
  storage->set_data_ptr_noswap(
      {zeroes->data_ptr(), zeroes, [](void* held) { delete static_cast<at::Tensor*>(held); }, zeroes->device()});
  storage->clear_data_ptr_access_error_msg_();
  unwatch(storage, *this);
  real_ = true;
}

bool GradientStandIn::zero(c10::StorageImpl*) {
  zeroed_ = true;
  return true;
}

}  // namespace shoal
