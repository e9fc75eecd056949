#pragma once
// Version of a tensor, to see whether it has been written to or replaced since.

#include <ATen/ATen.h>

namespace shoal {

// Does not keep the tensor alive. Autograd does not count what is written to data().
class TensorVersion {
 public:
  TensorVersion() = default;
  explicit TensorVersion(const at::Tensor& tensor)
      : tensor_(tensor.getIntrusivePtr()), version_(tensor.defined() ? tensor._version() : 0) {}

  // Whether `now` is the same tensor, with the same values. False of an undefined one.
  bool is_of(const at::Tensor& now) const {
    return now.defined() && tensor_.lock().get() == now.unsafeGetTensorImpl() && now._version() == version_;
  }

 private:
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  Weak tensor_{c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
  int64_t version_ = 0;
};

}  // namespace shoal
