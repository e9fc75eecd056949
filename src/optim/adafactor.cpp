#include "shoal/optim.h"

#include <torch/utils.h>

#include <algorithm>
#include <cmath>
#include <tuple>

#include "optim/faults.h"
#include "optim/updates.h"

namespace shoal {

void AdafactorOptions::validate() const {
  Faults("Adafactor")
      .not_negative("lr", lr())
      .require(beta2_decay() <= 0, "beta2_decay", beta2_decay(), "0 or a negative number")
      .not_negative("eps1", eps1().value_or(0))
      .not_negative("eps2", eps2())
      .require(d() >= 1, "d", d(), "a number of at least 1")
      .not_negative("weight_decay", weight_decay())
      .below_one("beta1", beta1())
      .raise();
}

bool AdafactorOptions::operator==(const AdafactorOptions& other) const {
  const auto all = [](const AdafactorOptions& it) {
    return std::tie(it.lr_, it.beta2_decay_, it.eps1_, it.eps2_, it.d_, it.weight_decay_, it.beta1_);
  };
  return all(*this) == all(other);
}

void AdafactorOptions::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(beta2_decay);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(eps1);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(eps2);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(d);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(beta1);
}

void AdafactorOptions::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, beta2_decay);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG_OPTIONAL(double, eps1);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, eps2);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, d);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, weight_decay);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, beta1);
}

void AdafactorParamState::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(step);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(row_var);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(col_var);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(variance);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(exp_avg);
}

void AdafactorParamState::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(int64_t, step);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(at::Tensor, row_var);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(at::Tensor, col_var);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(at::Tensor, variance);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(at::Tensor, exp_avg);
}

namespace {

std::vector<int64_t> shape_of_rows(const at::Tensor& parameter) {
  auto shape = parameter.sizes().vec();
  shape.back() = 1;
  return shape;
}

std::vector<int64_t> shape_of_columns(const at::Tensor& parameter) {
  auto shape = parameter.sizes().vec();
  shape[shape.size() - 2] = 1;
  return shape;
}

AdafactorParamState fresh_state(const at::Tensor& parameter, const AdafactorOptions& options) {
  AdafactorParamState state;
  if (parameter.dim() > 1) {
    state.row_var(at::zeros(shape_of_rows(parameter), parameter.options()))
        .col_var(at::zeros(shape_of_columns(parameter), parameter.options()));
  } else {
    state.variance(at::zeros_like(parameter));
  }
  if (options.beta1() > 0) state.exp_avg(at::zeros_like(parameter));
  return state;
}

// UsageError, before anything has changed, for state that does not fit, and for state that was made without beta1 and
// lacks what it needs.
void require_fit(const at::Tensor& parameter, const AdafactorParamState& state, const AdafactorOptions& options) {
  if (parameter.dim() > 1) {
    require_state(state.row_var(), "row_var", shape_of_rows(parameter), parameter, "Adafactor");
    require_state(state.col_var(), "col_var", shape_of_columns(parameter), parameter, "Adafactor");
  } else {
    require_state(state.variance(), "variance", parameter.sizes(), parameter, "Adafactor");
  }
  if (options.beta1() == 0) return;
  require_shape(state.exp_avg(), "exp_avg", parameter, "Adafactor");
  if (state.exp_avg().defined()) return;
  throw UsageError(fmt::format(
      "Adafactor: beta1 is set, and the state of a parameter [{}] has no exp_avg, because it was made without: set "
      "beta1 to 0, or begin with new state",
      fmt::join(parameter.sizes(), ", ")));
}

double root_mean_square(const at::Tensor& tensor) {
  return tensor.norm().item<double>() / std::sqrt(static_cast<double>(tensor.numel()));
}

double machine_epsilon(at::ScalarType dtype) {
  double epsilon = 0;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, dtype, "machine_epsilon",
                                  [&] { epsilon = static_cast<double>(std::numeric_limits<scalar_t>::epsilon()); });
  return epsilon;
}

// Mean of squares along a dimension, without a temporary of the gradient's size.
at::Tensor mean_square(const at::Tensor& gradient, int64_t dim) {
  return gradient.norm(2, dim, /*keepdim=*/true).square_().div_(gradient.size(dim));
}

// Second moment of every element after this step, as a new tensor.
at::Tensor second_moment(const at::Tensor& gradient, AdafactorParamState& state, double weight, double eps1) {
  if (gradient.dim() <= 1) return state.variance().lerp_(gradient * gradient, weight).clone();
  state.row_var().lerp_(mean_square(gradient, -1), weight);
  state.col_var().lerp_(mean_square(gradient, -2), weight);
  return at::matmul(state.row_var(), state.col_var())
      .div_(state.row_var().mean(at::IntArrayRef{-2}, /*keepdim=*/true).clamp_(eps1));
}

void update(const at::Tensor& parameter, const at::Tensor& gradient, AdafactorParamState& state,
            const AdafactorOptions& options) {
  state.step(state.step() + 1);
  if (parameter.numel() == 0) return;
  const auto step = static_cast<double>(state.step());
  const double eps1 = options.eps1().value_or(machine_epsilon(parameter.scalar_type()));
  const double relative = std::min(options.lr(), 1 / std::sqrt(step));
  const double scale = std::max(options.eps2(), root_mean_square(parameter)) * relative;
  if (options.weight_decay() != 0) parameter.mul_(1 - options.lr() * options.weight_decay());
  const auto change = second_moment(gradient, state, std::pow(step, options.beta2_decay()), eps1)
                          .clamp_(eps1 * eps1)
                          .rsqrt_()
                          .mul_(gradient);
  const double factor = scale / std::max(1.0, root_mean_square(change) / options.d());
  if (options.beta1() > 0) {
    parameter.sub_(state.exp_avg().mul_(options.beta1()).add_(change, factor * (1 - options.beta1())));
  } else {
    parameter.sub_(change, factor);
  }
}

}  // namespace

at::Tensor Adafactor::step(LossClosure closure) {
  const torch::NoGradGuard no_grad;
  auto loss = evaluate(closure);
  const auto groups = collect_updates(*this, "Adafactor");
  check_states(groups, require_fit);
  for (size_t i = 0; i < groups.size(); ++i) {
    for (const auto& [parameter, gradient] : groups[i]) {
      auto& state = state_of(parameter, [&, &p = parameter] { return fresh_state(p, options_of(i)); });
      update(parameter, gradient, state, options_of(i));
    }
  }
  return loss;
}

}  // namespace shoal
