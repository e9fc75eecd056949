#include "engine/gradients/spent_gradients.h"

#include <fmt/format.h>
#include <torch/utils.h>

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

SpentGradients::Fates SpentGradients::fates() const {
  Fates found;
  for (size_t i = 0; i < gradients_.size(); ++i) {
    if (!left_[i] || !gradients_[i].parameter.requires_grad()) continue;
    auto& first = found[static_cast<size_t>(fate(i))];
    first = first.value_or(i);
  }
  return found;
}

void SpentGradients::check() const {
  refuse_mixed(fates());
}

void SpentGradients::clear() {
  if (!any_) return;
  any_ = false;
  const auto found = fates();
  for (size_t i = 0; i < gradients_.size(); ++i) {
    if (stand_ins_.present(i)) at::Tensor(gradients_[i].parameter).mutable_grad().reset();
  }
  left_.assign(gradients_.size(), false);
  refuse_mixed(found);
}

void SpentGradients::refuse_mixed(const Fates& fates) const {
  const auto of = [&](Fate fate) { return fates[static_cast<size_t>(fate)]; };
  const auto untouched = of(Fate::untouched), dropped = of(Fate::dropped), zeroed = of(Fate::zeroed);
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
