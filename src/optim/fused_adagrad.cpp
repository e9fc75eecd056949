#include "shoal/optim.h"

#include <ATen/ops/_fused_adagrad.h>
#include <torch/utils.h>

#include <map>

#include "optim/updates.h"

namespace shoal {
namespace {

using torch::optim::AdagradOptions;
using torch::optim::AdagradParamState;

// Arguments of one kernel call: tensors of one dtype.
struct AdagradBatch {
  std::vector<at::Tensor> parameters, gradients, sums, steps;
};

AdagradParamState& state_of(torch::optim::Optimizer& optimizer, const at::Tensor& parameter,
                            const AdagradOptions& options) {
  auto& slot = optimizer.state()[parameter.unsafeGetTensorImpl()];
  if (!slot) {
    auto fresh = std::make_unique<AdagradParamState>();
    fresh->step(0);
    fresh->sum(at::full_like(parameter, options.initial_accumulator_value(), at::MemoryFormat::Preserve));
    slot = std::move(fresh);
  }
  return static_cast<AdagradParamState&>(*slot);
}

}  // namespace

at::Tensor FusedAdagrad::step(LossClosure closure) {
  const torch::NoGradGuard no_grad;
  auto loss = evaluate(closure);
  const auto runs = collect_aligned_updates(*this, "FusedAdagrad");
  for (const auto& run : runs) {
    for (const auto& [parameter, gradient] : run.updates) {
      const auto found = state_.find(parameter.unsafeGetTensorImpl());
      if (found == state_.end()) continue;
      const auto& state = detail::state_as<AdagradParamState>(*this, parameter, *found->second);
      require_shape(state.sum(), "sum", parameter, "FusedAdagrad");
    }
  }
  for (const auto& [group, updates] : runs) {
    const auto& options = static_cast<const AdagradOptions&>(param_groups_[group].options());
    std::map<at::ScalarType, AdagradBatch> batches;
    for (const auto& [parameter, gradient] : updates) {
      auto& state = state_of(*this, parameter, options);
      state.step(state.step() + 1);
      auto& batch = batches[parameter.scalar_type()];
      batch.parameters.push_back(parameter);
      batch.gradients.push_back(gradient);
      batch.sums.push_back(aligned(state.sum(), parameter));
      // The kernel takes the step as a tensor.
      batch.steps.push_back(at::full({}, static_cast<double>(state.step()), parameter.options().dtype(at::kFloat)));
    }
    for (auto& [dtype, batch] : batches) {
      at::_fused_adagrad_(batch.parameters, batch.gradients, batch.sums, batch.steps, options.lr(), options.lr_decay(),
                          options.weight_decay(), options.eps(), /*maximize=*/false);
    }
  }
  return loss;
}

}  // namespace shoal
