#include "engine/gradients/spent_gradients.h"

#include <fmt/format.h>
#include <torch/utils.h>

#include <optional>

#include "shoal/error.h"

namespace shoal {

SpentGradients::SpentGradients(const std::vector<Gradient>& gradients, std::string who, std::string about)
    : gradients_(gradients), who_(std::move(who)), stand_ins_(gradients, std::move(about)), left_(gradients.size()) {}

void SpentGradients::leave(size_t gradient) {
  stand_ins_.put(gradient);
  left_[gradient] = gradients_[gradient].parameter.numel() > 0;
  any_ = true;
}

// A stand-in that was zeroed and then dropped counts as zeroed.
SpentGradients::Fate SpentGradients::fate(size_t gradient) const {
  if (stand_ins_.zeroed(gradient)) return Fate::zeroed;
  if (!gradients_[gradient].parameter.grad().defined()) return Fate::dropped;
  return stand_ins_.present(gradient) ? Fate::untouched : Fate::replaced;
}

void SpentGradients::clear() {
  if (!any_) return;
  any_ = false;
  std::optional<size_t> untouched, dropped, zeroed;
  for (size_t i = 0; i < gradients_.size(); ++i) {
    const auto& parameter = gradients_[i].parameter;
    if (left_[i] && parameter.requires_grad()) {
      const auto what = fate(i);
      if (what == Fate::untouched) untouched = untouched.value_or(i);
      if (what == Fate::dropped) dropped = dropped.value_or(i);
      if (what == Fate::zeroed) zeroed = zeroed.value_or(i);
    }
    if (stand_ins_.present(i)) at::Tensor(parameter).mutable_grad().reset();
  }
  left_.assign(gradients_.size(), false);
  if (zeroed && (dropped || untouched)) refuse(*zeroed, untouched ? *untouched : *dropped);
  if (dropped && untouched) refuse(*dropped, *untouched);
}

void SpentGradients::refuse(size_t touched, size_t untouched) const {
  throw UsageError(fmt::format(
      "{}: after the last backward, the gradient of parameter {} was zeroed or dropped, but that of {} was "
      "not; backward had already used both for its update. To leave a parameter out of the update, freeze it "
      "before forward (requires_grad_(false)), or zero its gradient in a hook (register_hook)",
      who_, gradients_[touched].name, gradients_[untouched].name));
}

}  // namespace shoal
