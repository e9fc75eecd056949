#pragma once
// What lies in grad() where a gradient's sum does not lie whole on this rank.

#include <torch/types.h>

#include <string>

#include "engine/paging/operator_watch.h"

namespace shoal {

// A tensor with the parameter's sizes, strides, dtype and device, and without memory. Zeroing it is noticed, through
// whatever alias (libtorch's zero_grad detaches first); every other operator that would read or change it throws a
// UsageError instead, and so does data_ptr() (as libtorch's own error). Once it is zero an operator that takes it finds
// zeroes: then it gets memory and is a tensor as any other.
class GradientStandIn : private MemoryUser {
 public:
  // about: ends the sentence "<operator> takes ...".
  GradientStandIn(const at::Tensor& parameter, std::string about);
  ~GradientStandIn() override;
  GradientStandIn(const GradientStandIn&) = delete;
  GradientStandIn& operator=(const GradientStandIn&) = delete;

  const at::Tensor& tensor() const { return tensor_; }
  // Whether a tensor is this one, or an alias of it, still without memory.
  bool is(const at::Tensor& tensor) const;
  // Whether it has been zeroed since it was made or renewed.
  bool zeroed() const { return zeroed_; }
  void renew() { zeroed_ = false; }
  // Whether it has become a tensor as any other; then it stands for nothing any more.
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
