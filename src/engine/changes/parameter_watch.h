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

// Compares parameters with a snapshot. torch::load(module), Module::load, Module::to and set_data give a parameter
// other memory, perhaps another dtype, while the module and the optimizer keep the same tensor. A check takes some
// nanoseconds per parameter and allocates nothing. Not thread-safe.
class ParameterWatch {
 public:
  // counted: writes in place count as changes, too, for parameters that only the engine updates.
  enum class Versions { ignored, counted };

  ParameterWatch() = default;
  // Takes a snapshot of the parameters.
  explicit ParameterWatch(std::vector<at::Tensor> parameters, Versions versions = Versions::ignored);

  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  // True if the parameter has other memory, dtype, sizes or strides, or with Versions::counted was written to.
  bool changed(size_t number) const;
  // True if the parameter has other memory, dtype, sizes or strides.
  bool replaced(size_t number) const;
  // True if any parameter has changed, or its requires_grad has.
  bool changed() const;
  bool other_shape(size_t number) const;
  // True if dtype, device or shape differ.
  bool other_kind(size_t number) const;
  // True if only the floating-point dtype differs.
  bool other_floating_dtype(size_t number) const;
  at::IntArrayRef strides(size_t number) const { return known_[number].strides; }
  bool trainable_changed(size_t number) const;
  // "it is float64 [3, 2] on cpu, and was float32 [3, 2] on cpu"; likewise for requires_grad.
  std::string describe(size_t number) const;
  // Renews the snapshot.
  void note();
  void note(size_t number);

 private:
  struct Known {
    // Weak: does not keep the memory, but keeps its address from being reused.
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
