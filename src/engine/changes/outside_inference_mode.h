#pragma once
// Scope for the engine's own work when the caller is in InferenceMode or in a TorchDispatchMode of Python.

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <optional>
#include <utility>

namespace shoal {

// Modes of the program do not see this thread's operators.
class WithoutModes {
 public:
  WithoutModes() {
    if (Modes::any_modes_set()) modes_ = exchange({});
  }
  ~WithoutModes() {
    if (modes_) exchange(std::move(*modes_));
  }
  WithoutModes(const WithoutModes&) = delete;
  WithoutModes& operator=(const WithoutModes&) = delete;

 private:
  using Modes = c10::impl::TorchDispatchModeTLS;
  static Modes exchange(Modes modes) {
    auto former = Modes::get_state();
    Modes::set_state(std::move(modes));
    return former;
  }

  std::optional<Modes> modes_;
};

// Takes this thread out of InferenceMode: tensors made in InferenceMode must not be written to outside of it, and the
// engine's own tensors are written to in training. Grad mode stays off, as in InferenceMode. Modes of the program do
// not see the engine's operators: selective activation checkpointing expects the same ones in each run of a part.
class OutsideInferenceMode {
 public:
  OutsideInferenceMode() {
    if (!c10::InferenceMode::is_enabled()) return;
    outside_.emplace(false);
    no_grad_.emplace();
  }
  OutsideInferenceMode(const OutsideInferenceMode&) = delete;
  OutsideInferenceMode& operator=(const OutsideInferenceMode&) = delete;

 private:
  WithoutModes without_modes_;  // outermost: the end of a change of InferenceMode takes the modes' dispatch keys away
  std::optional<c10::InferenceMode> outside_;
  std::optional<at::NoGradGuard> no_grad_;
};

}  // namespace shoal
