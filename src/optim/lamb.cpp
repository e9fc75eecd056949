#include "shoal/optim.h"

#include <torch/utils.h>

#include <cmath>
#include <tuple>

#include "optim/faults.h"
#include "optim/updates.h"

namespace shoal {

void LambOptions::validate() const {
  Faults("Lamb")
      .not_negative("lr", lr())
      .below_one("betas[0]", std::get<0>(betas()))
      .below_one("betas[1]", std::get<1>(betas()))
      .not_negative("eps", eps())
      .not_negative("weight_decay", weight_decay())
      .raise();
}

bool LambOptions::operator==(const LambOptions& other) const {
  const auto all = [](const LambOptions& it) {
    return std::tie(it.lr_, it.betas_, it.eps_, it.weight_decay_, it.bias_correction_, it.always_adapt_);
  };
  return all(*this) == all(other);
}

void LambOptions::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(betas);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(eps);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(bias_correction);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(always_adapt);
}

void LambOptions::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(betas_t, betas);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, eps);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, weight_decay);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, bias_correction);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, always_adapt);
}

void LambParamState::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(step);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(exp_avg);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(exp_avg_sq);
}

void LambParamState::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(int64_t, step);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(at::Tensor, exp_avg);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(at::Tensor, exp_avg_sq);
}

namespace {

void update(const at::Tensor& parameter, const at::Tensor& gradient, LambParamState& state,
            const LambOptions& options) {
  const auto [beta1, beta2] = options.betas();
  state.step(state.step() + 1);
  const auto step = static_cast<double>(state.step());
  state.exp_avg().mul_(beta1).add_(gradient, 1 - beta1);
  state.exp_avg_sq().mul_(beta2).addcmul_(gradient, gradient, 1 - beta2);
  const double correction1 = options.bias_correction() ? 1 - std::pow(beta1, step) : 1;
  const double correction2 = options.bias_correction() ? 1 - std::pow(beta2, step) : 1;
  const auto change = (state.exp_avg() / correction1)
                          .div_((state.exp_avg_sq() / correction2).sqrt_().add_(options.eps()))
                          .add_(parameter, options.weight_decay());
  double ratio = 1;
  if (options.always_adapt() || options.weight_decay() != 0) {
    const auto own = parameter.norm().item<double>(), of_change = change.norm().item<double>();
    if (own > 0 && of_change > 0) ratio = own / of_change;
  }
  parameter.sub_(change, options.lr() * ratio);
}

}  // namespace

at::Tensor Lamb::step(LossClosure closure) {
  const torch::NoGradGuard no_grad;
  auto loss = evaluate(closure);
  const auto groups = collect_updates(*this, "Lamb");
  check_states(groups, [](const at::Tensor& parameter, const LambParamState& state, const LambOptions&) {
    require_state(state.exp_avg(), "exp_avg", parameter.sizes(), parameter, "Lamb");
    require_state(state.exp_avg_sq(), "exp_avg_sq", parameter.sizes(), parameter, "Lamb");
  });
  for (size_t i = 0; i < groups.size(); ++i) {
    for (const auto& [parameter, gradient] : groups[i]) {
      auto& state = state_of(parameter, [&, &p = parameter] {
        return LambParamState().exp_avg(at::zeros_like(p)).exp_avg_sq(at::zeros_like(p));
      });
      update(parameter, gradient, state, options_of(i));
    }
  }
  return loss;
}

}  // namespace shoal
