#pragma once
// Stand-in for grad() on a rank that does not hold the gradient's whole sum.

#include <torch/types.h>

#include <string>

#include "engine/changes/operator_watch.h"

namespace shoal {

// Whether to() of a stand-in returns it where it converts nothing, as Module.to of Python needs, which converts
// gradients, too. By default it is refused as other operators are: C++ reads what it returns by data_ptr(). One for the
// process.
void let_stand_ins_pass_to(bool pass);

// A tensor with the parameter's sizes, strides, dtype and device, but without memory. Zeroing it through any alias is
// noticed (libtorch's zero_grad detaches first); every other operator that would read or change it throws a UsageError,
// and data_ptr() throws libtorch's own error. Once zeroed, it gets memory full of zeros when an operator takes it, and
// is an ordinary tensor from then on.
class GradientStandIn : private MemoryUser {
 public:
  // about: the end of the sentence "<operator> takes ...".
  GradientStandIn(const at::Tensor& parameter, std::string about);
  ~GradientStandIn() override;
  GradientStandIn(const GradientStandIn&) = delete;
  GradientStandIn& operator=(const GradientStandIn&) = delete;

  const at::Tensor& tensor() const { return tensor_; }
  // Whether `tensor` is this stand-in or an alias of it, still without memory.
  bool is(const at::Tensor& tensor) const;
  // Whether it was zeroed since it was made or renewed.
  bool zeroed() const { return zeroed_; }
  void renew() { zeroed_ = false; }
  // Whether it has become an ordinary tensor; it stands for nothing then.
  bool real() const { return real_; }

 private:
  void begin_use(std::string_view op, std::span<c10::StorageImpl* const> memory) override;
  bool zero(c10::StorageImpl* memory) override;
  void become_real();
  void end_use(std::span<c10::StorageImpl* const>) noexcept override {}

  std::string about_;
  at::Tensor tensor_;
  bool zeroed_ = false;
  bool real_ = false;
};

}  // namespace shoal
