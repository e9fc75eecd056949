#pragma once
// Tensors of a c10d call in the form that operations of a group need.

#include <functional>
#include <string>
#include <vector>

#include "shoal/detail/call.h"

namespace shoal {

using Tensors = std::vector<at::Tensor>;

// Aliases of contiguous tensors, and contiguous copies of others; results are copied back when the operations have
// ended. All throw UsageError for tensors that are not dense tensors on the CPU.
class Operands {
 public:
  // operation: for errors.
  explicit Operands(std::string operation) : operation_(std::move(operation)) {}

  at::Tensor input(const at::Tensor& tensor);
  at::Tensor output(const at::Tensor& tensor);
  at::Tensor in_out(const at::Tensor& tensor);
  Tensors inputs(const Tensors& tensors);
  Tensors outputs(const Tensors& tensors);

  // Checks that exactly one tensor is given, or one per rank; and that a part has the shape of the whole it belongs to.
  void require_one(const Tensors& tensors) const;
  void require_one_per_rank(const Tensors& tensors, int ranks) const;
  void require_same_shape(const at::Tensor& part, const at::Tensor& other) const;
  [[noreturn]] void refuse(const std::string& why) const;

  // Writes a sum over `divisor`, rounded towards zero, to `result`, before that is copied to its tensor.
  void divide_when_done(const at::Tensor& sum, int64_t divisor, const at::Tensor& result);

  // For BackendFlight.
  Tensors take_kept() { return std::move(kept_); }
  std::vector<std::function<void()>> take_finish() { return std::move(finish_); }

 private:
  void check(const at::Tensor& tensor) const;
  bool fits(const at::Tensor& tensor) const;

  std::string operation_;
  Tensors kept_;
  std::vector<std::function<void()>> finish_;
};

// Complex tensors as real ones of twice as many elements, in the same memory: so they are summed.
Tensors as_real(Tensors tensors);

// Whether all tensors have one dtype, which is one of integers.
bool of_one_integer_type(const Tensors& inputs, const Tensors& outputs);
// Copies in int64, which holds the sum of narrower integers over all ranks; tensors of 64 bits as they are.
Tensors as_int64(Tensors tensors);

}  // namespace shoal
