#include "shoal/optim/fused_adamw.h"

#include <ATen/ops/_fused_adamw.h>
#include <torch/utils.h>

#include <map>

#include "shoal/base/error.h"

namespace shoal {
namespace {

using torch::optim::AdamWOptions;
using torch::optim::AdamWParamState;

// What one kernel call takes: tensors of equal dtype and step.
struct Batch {
  std::vector<at::Tensor> parameters, gradients, first, second, largest, steps;
};

AdamWParamState& state_of(torch::optim::Optimizer& optimizer, const at::Tensor& parameter, bool amsgrad) {
  auto& slot = optimizer.state()[parameter.unsafeGetTensorImpl()];
  if (!slot) {
    auto fresh = std::make_unique<AdamWParamState>();
    fresh->step(0);
    fresh->exp_avg(at::zeros_like(parameter, at::MemoryFormat::Preserve));
    fresh->exp_avg_sq(at::zeros_like(parameter, at::MemoryFormat::Preserve));
    if (amsgrad) fresh->max_exp_avg_sq(at::zeros_like(parameter, at::MemoryFormat::Preserve));
    slot = std::move(fresh);
  }
  return static_cast<AdamWParamState&>(*slot);
}

// The kernel walks all tensors of a parameter side by side, element by element in memory.
at::Tensor like(const at::Tensor& gradient, const at::Tensor& parameter) {
  if (!parameter.is_non_overlapping_and_dense()) {
    throw UsageError("FusedAdamW: a parameter has gaps in memory; give it memory of its own (clone) or use AdamW");
  }
  return gradient.strides() == parameter.strides() ? gradient : at::empty_like(parameter).copy_(gradient);
}

void update(Batch& batch, const AdamWOptions& options) {
  const auto [beta1, beta2] = options.betas();
  at::_fused_adamw_(batch.parameters, batch.gradients, batch.first, batch.second, batch.largest, batch.steps,
                    options.lr(), beta1, beta2, options.weight_decay(), options.eps(), options.amsgrad(),
                    /*maximize=*/false);
}

}  // namespace

at::Tensor FusedAdamW::step(LossClosure closure) {
  const torch::NoGradGuard no_grad;
  at::Tensor loss;
  if (closure != nullptr) {
    const at::AutoGradMode grad(true);
    loss = closure();
  }
  for (auto& group : param_groups_) {
    const auto& options = static_cast<const AdamWOptions&>(group.options());
    std::map<at::ScalarType, Batch> batches;
    for (const auto& parameter : group.params()) {
      const auto& gradient = parameter.grad();
      if (!gradient.defined()) continue;
      if (gradient.is_sparse()) throw UsageError("FusedAdamW: sparse gradients are not supported; use SparseAdam");
      auto& state = state_of(*this, parameter, options.amsgrad());
      state.step(state.step() + 1);
      auto& batch = batches[parameter.scalar_type()];
      batch.parameters.push_back(parameter);
      batch.gradients.push_back(like(gradient, parameter));
      batch.first.push_back(state.exp_avg());
      batch.second.push_back(state.exp_avg_sq());
      if (options.amsgrad()) batch.largest.push_back(state.max_exp_avg_sq());
      // The kernel wants the number of the step as a tensor.
      batch.steps.push_back(at::full({}, static_cast<double>(state.step()), parameter.options().dtype(at::kFloat)));
    }
    for (auto& [dtype, batch] : batches) update(batch, options);
  }
  return loss;
}

}  // namespace shoal
