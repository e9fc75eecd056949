#pragma once
// Scope in which a model has the mean of the ranks' parameters.

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <functional>
#include <utility>
#include <vector>

namespace shoal {

// Scope of mean_parameters() of LocalUpdates and ShardGossipOptimizer: parameters hold the mean, and its end restores
// this rank's own values. A step within it is a UsageError. Move-only.
class MeanParameters {
 public:
  using Saved = std::vector<std::pair<at::Tensor, at::Tensor>>;  // tensors of the module, each with its own values

  // ended: called at the end of the scope, once; it may throw when its work is done.
  explicit MeanParameters(Saved saved, std::function<void()> ended = {})
      : saved_(std::move(saved)), ended_(std::move(ended)) {}
  MeanParameters(MeanParameters&& other) noexcept
      : saved_(std::exchange(other.saved_, {})), ended_(std::exchange(other.ended_, {})) {}
  MeanParameters& operator=(MeanParameters&&) = delete;
  ~MeanParameters() {  // throws nothing: communication errors are thrown by the next call
    try {
      end();
    } catch (...) {  // NOLINT(bugprone-empty-catch): see above
    }
  }
  // Ends the scope before its destruction. Throws what fails there, and what WorldOptions::while_waiting throws.
  void end() {
    const at::NoGradGuard no_grad;
    for (auto& [tensor, own] : std::exchange(saved_, {})) tensor.copy_(own);
    if (const auto ended = std::exchange(ended_, {})) ended();
  }

 private:
  Saved saved_;
  std::function<void()> ended_;
};

}  // namespace shoal
