#pragma once
// Detection of changed parameters: libtorch lets users replace their memory, dtype and requires_grad at any time.

#include <c10/core/StorageImpl.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/types.h>

#include <optional>
#include <string>
#include <vector>

namespace shoal {

// Knows what parameters were when they were last noted. torch::load(module), Module::load, Module::to and set_data give
// a parameter other memory, and maybe another dtype, while it stays the same tensor to its module and its optimizer.
// Asking costs some nanoseconds per parameter and allocates nothing. Not thread-safe.
class ParameterWatch {
 public:
  // `versions`: whether writes in place count as changes too, for parameters that only the engine updates.
  enum class Versions { ignored, counted };

  ParameterWatch() = default;
  // As they are now.
  explicit ParameterWatch(std::vector<at::Tensor> parameters, Versions versions = Versions::ignored);

  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  // Other memory, another kind, or with Versions::counted other values.
  bool changed(size_t number) const;
  // Of any of them, or of its requires_grad.
  bool changed() const;
  bool other_shape(size_t number) const;
  // Another dtype, device or shape.
  bool other_kind(size_t number) const;
  // Another floating-point dtype, and nothing else.
  bool other_floating_dtype(size_t number) const;
  at::IntArrayRef strides(size_t number) const { return known_[number].strides; }
  bool trainable_changed(size_t number) const;
  // "it is float64 [3, 2] on cpu, and was float32 [3, 2] on cpu"; of requires_grad, too.
  std::string describe(size_t number) const;
  // What they are now is what they were.
  void note();
  void note(size_t number);

 private:
  struct Known {
    // Weak, so that no other memory gets its address.
    std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> storage{};
    const c10::StorageImpl* address = nullptr;
    int64_t offset = 0;
    c10::SmallVector<int64_t, 5> sizes{};
    c10::SmallVector<int64_t, 5> strides{};
    at::ScalarType dtype = at::kFloat;
    at::Device device = at::kCPU;
    bool requires_grad = false;
    int64_t version = 0;
  };

  std::vector<at::Tensor> parameters_;
  std::vector<Known> known_;
  bool versions_ = false;
};

}  // namespace shoal
