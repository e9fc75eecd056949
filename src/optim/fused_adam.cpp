#include "shoal/optim.h"

#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/utils.h>

#include <map>

#include "optim/updates.h"
#include "shoal/error.h"

namespace shoal {
namespace {

// Arguments of one kernel call: tensors of one dtype.
struct AdamBatch {
  std::vector<at::Tensor> parameters, gradients, first, second, largest, steps;
};

template <class State>
State& state_of(torch::optim::Optimizer& optimizer, const at::Tensor& parameter, bool amsgrad) {
  auto& slot = optimizer.state()[parameter.unsafeGetTensorImpl()];
  if (!slot) {
    auto fresh = std::make_unique<State>();
    fresh->step(0);
    fresh->exp_avg(at::zeros_like(parameter, at::MemoryFormat::Preserve));
    fresh->exp_avg_sq(at::zeros_like(parameter, at::MemoryFormat::Preserve));
    if (amsgrad) fresh->max_exp_avg_sq(at::zeros_like(parameter, at::MemoryFormat::Preserve));
    slot = std::move(fresh);
  }
  return static_cast<State&>(*slot);
}

// UsageError, before anything has changed, for state of another class, for state that does not fit, and for state that
// was made without amsgrad and lacks what it needs.
template <class State>
void require_fit(torch::optim::Optimizer& optimizer, const at::Tensor& parameter, bool amsgrad, const char* name) {
  const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
  if (found == optimizer.state().end()) return;
  const auto& state = detail::state_as<State>(optimizer, parameter, *found->second);
  require_shape(state.exp_avg(), "exp_avg", parameter, name);
  require_shape(state.exp_avg_sq(), "exp_avg_sq", parameter, name);
  if (!amsgrad) return;
  require_shape(state.max_exp_avg_sq(), "max_exp_avg_sq", parameter, name);
  if (state.max_exp_avg_sq().defined()) return;
  throw UsageError(fmt::format(
      "{}: amsgrad is set, and the state of a parameter [{}] has no max_exp_avg_sq, because it was made without: "
      "unset amsgrad, or begin with new state",
      name, fmt::join(parameter.sizes(), ", ")));
}

// Adam and AdamW differ only in the kernel and the names of their types.
template <class Options, class State, class Kernel>
at::Tensor step_with(torch::optim::Optimizer& optimizer, const torch::optim::Optimizer::LossClosure& closure,
                     const char* name, Kernel kernel) {
  const torch::NoGradGuard no_grad;
  auto loss = evaluate(closure);
  const auto runs = collect_aligned_updates(optimizer, name);
  for (const auto& [group, updates] : runs) {
    const bool amsgrad = static_cast<const Options&>(optimizer.param_groups()[group].options()).amsgrad();
    for (const auto& [parameter, gradient] : updates) require_fit<State>(optimizer, parameter, amsgrad, name);
  }
  for (const auto& [group, updates] : runs) {
    const auto& options = static_cast<const Options&>(optimizer.param_groups()[group].options());
    std::map<at::ScalarType, AdamBatch> batches;
    for (const auto& [parameter, gradient] : updates) {
      auto& state = state_of<State>(optimizer, parameter, options.amsgrad());
      state.step(state.step() + 1);
      auto& batch = batches[parameter.scalar_type()];
      batch.parameters.push_back(parameter);
      batch.gradients.push_back(gradient);
      batch.first.push_back(aligned(state.exp_avg(), parameter));
      batch.second.push_back(aligned(state.exp_avg_sq(), parameter));
      if (options.amsgrad()) batch.largest.push_back(aligned(state.max_exp_avg_sq(), parameter));
      // The kernel takes the step as a tensor.
      batch.steps.push_back(at::full({}, static_cast<double>(state.step()), parameter.options().dtype(at::kFloat)));
    }
    const auto [beta1, beta2] = options.betas();
    for (auto& [dtype, batch] : batches) {
      kernel(batch.parameters, batch.gradients, batch.first, batch.second, batch.largest, batch.steps, options.lr(),
             beta1, beta2, options.weight_decay(), options.eps(), options.amsgrad());
    }
  }
  return loss;
}

}  // namespace

at::Tensor FusedAdam::step(LossClosure closure) {
  return step_with<torch::optim::AdamOptions, torch::optim::AdamParamState>(
      *this, closure, "FusedAdam", [](auto&&... arguments) { at::_fused_adam_(arguments..., /*maximize=*/false); });
}

at::Tensor FusedAdamW::step(LossClosure closure) {
  return step_with<torch::optim::AdamWOptions, torch::optim::AdamWParamState>(
      *this, closure, "FusedAdamW", [](auto&&... arguments) { at::_fused_adamw_(arguments..., /*maximize=*/false); });
}

}  // namespace shoal
