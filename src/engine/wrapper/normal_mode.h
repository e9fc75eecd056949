#pragma once
// Scope for the engine's own work when the caller is in InferenceMode.

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <optional>

namespace shoal {

// Takes this thread out of InferenceMode: tensors made in InferenceMode must not be written to outside of it, and the
// engine's own tensors are written to in training. Grad mode stays off, as in InferenceMode. No effect if InferenceMode
// is off.
class NormalMode {
 public:
  NormalMode() {
    if (!c10::InferenceMode::is_enabled()) return;
    outside_.emplace(false);
    no_grad_.emplace();
  }

 private:
  std::optional<c10::InferenceMode> outside_;
  std::optional<at::NoGradGuard> no_grad_;
};

}  // namespace shoal
