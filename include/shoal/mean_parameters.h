#pragma once
// Scope in which a model has the mean of the ranks' parameters.

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <functional>
#include <utility>
#include <vector>

namespace shoal {

// Scope of mean_parameters() of LocalUpdates and ShardGossipOptimizer: parameters hold the mean, and the destructor restores
// this rank's own values. A step within it is a UsageError. Move-only.
class MeanParameters {
 public:
  using Saved = std::vector<std::pair<at::Tensor, at::Tensor>>;  // tensors of the module, each with its own values

  // ended: called at the end of the scope.
  explicit MeanParameters(Saved saved, std::function<void()> ended = {})
      : saved_(std::move(saved)), ended_(std::move(ended)) {}
  MeanParameters(MeanParameters&& other) noexcept
      : saved_(std::exchange(other.saved_, {})), ended_(std::exchange(other.ended_, {})) {}
  MeanParameters& operator=(MeanParameters&&) = delete;
  ~MeanParameters() {
    const at::NoGradGuard no_grad;
    for (auto& [tensor, own] : saved_) tensor.copy_(own);
    if (ended_) ended_();
  }

 private:
  Saved saved_;
  std::function<void()> ended_;
};

}  // namespace shoal
