#include "shoal/optim.h"

#include <torch/utils.h>

#include <cmath>
#include <tuple>

#include "optim/faults.h"
#include "optim/updates.h"

namespace shoal {

void AccumAdamOptions::validate() const {
  Faults("AccumAdam")
      .not_negative("lr", lr())
      .below_one("betas[0]", std::get<0>(betas()))
      .below_one("betas[1]", std::get<1>(betas()))
      .not_negative("eps", eps())
      .not_negative("weight_decay", weight_decay())
      .require(accum_iter() >= 1, "accum_iter", static_cast<double>(accum_iter()), "at least 1")
      .raise();
}

bool AccumAdamOptions::operator==(const AccumAdamOptions& other) const {
  const auto all = [](const AccumAdamOptions& it) {
    return std::tie(it.lr_, it.betas_, it.eps_, it.weight_decay_, it.accum_iter_);
  };
  return all(*this) == all(other);
}

void AccumAdamOptions::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(betas);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(eps);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(accum_iter);
}

void AccumAdamOptions::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(betas_t, betas);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, eps);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, weight_decay);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(int64_t, accum_iter);
}

void AccumAdamParamState::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(step);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(exp_avg);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(exp_avg_sq);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(accum_grad);
}

void AccumAdamParamState::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(int64_t, step);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(at::Tensor, exp_avg);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(at::Tensor, exp_avg_sq);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(at::Tensor, accum_grad);
}

namespace {

// gradient: includes the weight decay, if that is part of it.
void update(const at::Tensor& parameter, const at::Tensor& gradient, AccumAdamParamState& state,
            const AccumAdamOptions& options) {
  const auto [beta1, beta2] = options.betas();
  const auto accum_iter = options.accum_iter();
  state.step(state.step() + 1);
  state.accum_grad().add_(gradient, 1.0 / static_cast<double>(accum_iter));

  const auto updates = static_cast<double>((state.step() + accum_iter - 1) / accum_iter);
  const double correction1 = 1 - std::pow(beta1, updates);
  const double correction2 = std::sqrt(1 - std::pow(beta2, updates));
  const auto first = at::lerp(state.exp_avg(), gradient, 1 - beta1);
  // Scales eps instead of dividing the root, which saves a pass over memory.
  const auto denominator =
      (state.exp_avg_sq() * beta2).addcmul_(gradient, gradient, 1 - beta2).sqrt_().add_(options.eps() * correction2);
  parameter.addcdiv_(first, denominator, -options.lr() * correction2 / correction1);

  if (state.step() % accum_iter != 0) return;
  state.exp_avg().lerp_(state.accum_grad(), 1 - beta1);
  state.exp_avg_sq().mul_(beta2).addcmul_(state.accum_grad(), state.accum_grad(), 1 - beta2);
  state.accum_grad().zero_();
}

AccumAdamParamState fresh_state(const at::Tensor& parameter) {
  const auto zeros = [&] { return at::zeros_like(parameter); };
  return AccumAdamParamState().exp_avg(zeros()).exp_avg_sq(zeros()).accum_grad(zeros());
}

}  // namespace

at::Tensor AccumAdam::step_with(const LossClosure& closure, bool decoupled_decay) {
  const torch::NoGradGuard no_grad;
  auto loss = evaluate(closure);
  const char* name = decoupled_decay ? "AccumAdamW" : "AccumAdam";
  const auto groups = collect_updates(*this, name);
  check_states(groups, [&](const at::Tensor& parameter, const AccumAdamParamState& state, const AccumAdamOptions&) {
    require_state(state.exp_avg(), "exp_avg", parameter.sizes(), parameter, name);
    require_state(state.exp_avg_sq(), "exp_avg_sq", parameter.sizes(), parameter, name);
    require_state(state.accum_grad(), "accum_grad", parameter.sizes(), parameter, name);
  });
  for (size_t i = 0; i < groups.size(); ++i) {
    const auto& options = options_of(i);
    const double decay = options.weight_decay();
    for (const auto& [parameter, gradient] : groups[i]) {
      auto& state = state_of(parameter, [&p = parameter] { return fresh_state(p); });
      if (decoupled_decay && decay != 0) parameter.mul_(1 - options.lr() * decay);
      const bool in_gradient = !decoupled_decay && decay != 0;
      update(parameter, in_gradient ? gradient.add(parameter, decay) : gradient, state, options);
    }
  }
  return loss;
}

at::Tensor AccumAdam::step(LossClosure closure) {
  return step_with(closure, /*decoupled_decay=*/false);
}

at::Tensor AccumAdamW::step(LossClosure closure) {
  return step_with(closure, /*decoupled_decay=*/true);
}

}  // namespace shoal
