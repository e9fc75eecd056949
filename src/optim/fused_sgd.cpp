#include "shoal/optim.h"

#include <ATen/ops/_fused_sgd.h>
#include <torch/utils.h>

#include <map>

#include "optim/updates.h"

namespace shoal {
namespace {

using torch::optim::SGDOptions;
using torch::optim::SGDParamState;

// Arguments of one kernel call: tensors of one dtype, all with or all without an earlier momentum.
struct SgdBatch {
  std::vector<at::Tensor> parameters, gradients, momenta;
};

struct BatchKey {
  at::ScalarType dtype;
  bool first_step;
  auto operator<=>(const BatchKey&) const = default;
};

bool kernel_works(const at::Tensor& parameter) {
  return !parameter.is_cpu() || !at::isReducedFloatingType(parameter.scalar_type());
}

void update_by_kernel(const SgdBatch& batch, bool first_step, const SGDOptions& options) {
  at::_fused_sgd_(batch.parameters, batch.gradients, batch.momenta, options.weight_decay(), options.momentum(),
                  options.lr(), options.dampening(), options.nesterov(), /*maximize=*/false, first_step);
}

void update_by_operators(const SgdBatch& batch, bool first_step, const SGDOptions& options) {
  for (size_t i = 0; i < batch.parameters.size(); ++i) {
    auto gradient = batch.gradients[i];
    if (options.weight_decay() != 0) gradient = gradient.add(batch.parameters[i], options.weight_decay());
    if (options.momentum() != 0) {
      const auto& momentum = batch.momenta[i];
      if (first_step) {
        momentum.copy_(gradient);
      } else {
        momentum.mul_(options.momentum()).add_(gradient, 1 - options.dampening());
      }
      gradient = options.nesterov() ? gradient.add(momentum, options.momentum()) : momentum;
    }
    batch.parameters[i].add_(gradient, -options.lr());
  }
}

}  // namespace

at::Tensor FusedSGD::step(LossClosure closure) {
  const torch::NoGradGuard no_grad;
  auto loss = evaluate(closure);
  const auto runs = collect_aligned_updates(*this, "FusedSGD");
  for (const auto& run : runs) {
    for (const auto& [parameter, gradient] : run.updates) {
      const auto found = state_.find(parameter.unsafeGetTensorImpl());
      if (found == state_.end()) continue;
      const auto& state = detail::state_as<SGDParamState>(*this, parameter, *found->second);
      require_shape(state.momentum_buffer(), "momentum_buffer", parameter, "FusedSGD");
    }
  }
  for (const auto& [group, updates] : runs) {
    const auto& options = static_cast<const SGDOptions&>(param_groups_[group].options());
    std::map<BatchKey, SgdBatch> batches;
    for (const auto& [parameter, gradient] : updates) {
      at::Tensor momentum;
      bool first_step = false;
      if (options.momentum() != 0) {
        auto& slot = state_[parameter.unsafeGetTensorImpl()];
        if (!slot) slot = std::make_unique<SGDParamState>();
        auto& buffer = static_cast<SGDParamState&>(*slot).momentum_buffer();
        first_step = !buffer.defined();
        if (first_step) buffer = at::empty_like(parameter);
        momentum = aligned(buffer, parameter);
      }
      auto& batch = batches[{parameter.scalar_type(), first_step}];
      batch.parameters.push_back(parameter);
      batch.gradients.push_back(gradient);
      if (momentum.defined()) batch.momenta.push_back(momentum);
    }
    for (auto& [key, batch] : batches) {
      (kernel_works(batch.parameters[0]) ? update_by_kernel : update_by_operators)(batch, key.first_step, options);
    }
  }
  return loss;
}

}  // namespace shoal
