#pragma once
// The engine's own work for callers in InferenceMode.

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <optional>

namespace shoal {

// While it lives, this thread is outside of InferenceMode: tensors made in it may never be written to outside, and what
// the engine keeps is written to in training. Gradients stay disabled, as they are in InferenceMode. Without effect
// elsewhere.
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
