#include "shoal/precision.h"

#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/utils.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <utility>

#include "optim/scaler_options.h"
#include "shoal/error.h"

namespace shoal {
namespace {

bool usable(double scale) {
  return scale > 0 && scale <= std::numeric_limits<float>::max();
}

at::Tensor values_of(const at::Tensor& gradient) {
  return gradient.is_sparse() ? gradient._values() : gradient;
}

}  // namespace

void GradScalerOptions::validate() const {
  std::vector<std::string> faults;
  const auto require = [&](bool good, const char* name, double value, const char* wanted) {
    if (!good) faults.push_back(fmt::format("{} is {}: give {}", name, value, wanted));
  };
  require(usable(initial_scale), "initial_scale", initial_scale, "a positive number within float32's range");
  if (dynamic) {
    require(growth_factor > 1 && std::isfinite(growth_factor), "growth_factor", growth_factor, "a number above 1");
    require(backoff_factor > 0 && backoff_factor < 1, "backoff_factor", backoff_factor, "a number between 0 and 1");
    require(growth_interval > 0, "growth_interval", static_cast<double>(growth_interval), "steps above 0");
    require(hysteresis > 0, "hysteresis", static_cast<double>(hysteresis), "steps above 0");
    require(min_scale > 0 && min_scale <= initial_scale, "min_scale", min_scale,
            "a positive number up to initial_scale");
  }
  if (!faults.empty()) throw UsageError(fmt::format("GradScaler: {}", fmt::join(faults, "; ")));
}

std::string describe(const std::optional<GradScalerOptions>& scaler) {
  if (!scaler) return "no scaler";
  return fmt::format(
      "scaler with initial_scale {}, dynamic {}, growth_factor {}, backoff_factor {}, growth_interval {}, "
      "hysteresis {}, min_scale {}",
      scaler->initial_scale, scaler->dynamic, scaler->growth_factor, scaler->backoff_factor, scaler->growth_interval,
      scaler->hysteresis, scaler->min_scale);
}

GradScaler::GradScaler(const GradScalerOptions& options) : options_(options) {
  options.validate();
  state_ = {options.initial_scale, 0, options.hysteresis};
}

at::Tensor GradScaler::scale(const at::Tensor& loss) const {
  return loss * state_.scale;
}

bool GradScaler::unscale(const std::vector<at::Tensor>& gradients) const {
  const torch::NoGradGuard no_grad;
  // The kernel takes tensors of one device and dtype.
  std::map<std::pair<std::string, at::ScalarType>, std::vector<at::Tensor>> batches;
  for (const auto& gradient : gradients) {
    if (!gradient.defined()) continue;
    if (!gradient.is_floating_point()) {
      throw UsageError(fmt::format("GradScaler: a gradient has dtype {}; only floating-point gradients can be unscaled",
                                   c10::toString(gradient.scalar_type())));
    }
    const auto dense = values_of(gradient);
    batches[{dense.device().str(), dense.scalar_type()}].push_back(dense);
  }
  bool found = false;
  for (auto& [key, batch] : batches) {
    const auto options = batch[0].options().dtype(at::kFloat);
    auto found_inf = at::zeros({}, options);
    at::_amp_foreach_non_finite_check_and_unscale_(batch, found_inf, at::full({}, 1 / state_.scale, options));
    found = found_inf.item<float>() != 0 || found;
    for (const auto& gradient : batch) {
      if (gradient.numel() == 0) continue;
      const c10::weak_intrusive_ptr<c10::StorageImpl> storage(gradient.storage().getWeakStorageImpl());
      unscaled_.insert_or_assign(gradient.const_data_ptr(),
                                 Unscaled{storage, static_cast<uint32_t>(gradient._version())});
    }
  }
  std::erase_if(unscaled_, [](const auto& entry) { return entry.second.memory.expired(); });
  return found;
}

bool GradScaler::unscaled(const std::vector<at::Tensor>& gradients) const {
  return std::any_of(gradients.begin(), gradients.end(), [&](const at::Tensor& gradient) {
    if (!gradient.defined()) return false;
    const auto dense = values_of(gradient);
    if (!dense.has_storage() || dense.numel() == 0) return false;
    const auto found = unscaled_.find(dense.const_data_ptr());
    return found != unscaled_.end() && !found->second.memory.expired() &&
           found->second.version == static_cast<uint32_t>(dense._version());
  });
}

void GradScaler::update(bool found_inf_anywhere) {
  unscaled_.clear();
  if (!options_.dynamic) return;
  if (found_inf_anywhere) {
    state_.good_steps = 0;
    state_.hysteresis_left = std::max<int64_t>(state_.hysteresis_left - 1, 0);
    if (state_.hysteresis_left == 0) {
      state_.scale = std::max(state_.scale * options_.backoff_factor, options_.min_scale);
    }
    return;
  }
  if (++state_.good_steps < options_.growth_interval) return;
  state_.good_steps = 0;
  state_.hysteresis_left = options_.hysteresis;
  if (usable(state_.scale * options_.growth_factor)) state_.scale *= options_.growth_factor;
}

void GradScaler::load(const GradScalerState& state) {
  if (!usable(state.scale) || state.good_steps < 0 || state.hysteresis_left < 0) {
    throw UsageError(fmt::format("GradScaler: cannot load a scale of {}, {} good steps, {} steps of hysteresis left",
                                 state.scale, state.good_steps, state.hysteresis_left));
  }
  state_ = state;
  unscaled_.clear();
}

}  // namespace shoal
