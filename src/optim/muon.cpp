#include "shoal/optim.h"

#include <torch/utils.h>

#include <algorithm>
#include <cmath>
#include <tuple>

#include "optim/faults.h"
#include "optim/updates.h"

namespace shoal {

void MuonOptions::validate() const {
  Faults("Muon")
      .not_negative("lr", lr())
      .not_negative("weight_decay", weight_decay())
      .not_negative("momentum", momentum())
      .not_negative("eps", eps())
      .require(ns_steps() >= 0 && ns_steps() < 100, "ns_steps", static_cast<double>(ns_steps()), "0 to 99 steps")
      .raise();
}

bool MuonOptions::operator==(const MuonOptions& other) const {
  const auto all = [](const MuonOptions& it) {
    return std::tie(it.lr_, it.weight_decay_, it.momentum_, it.nesterov_, it.ns_coefficients_, it.eps_, it.ns_steps_,
                    it.adjust_lr_);
  };
  return all(*this) == all(other);
}

void MuonOptions::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(momentum);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(nesterov);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(ns_coefficients);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(eps);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(ns_steps);
  archive.write("adjust_lr", torch::IValue(static_cast<int64_t>(adjust_lr())));
}

void MuonOptions::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, weight_decay);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, momentum);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, nesterov);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(ns_coefficients_t, ns_coefficients);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, eps);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(int64_t, ns_steps);
  torch::IValue rate;
  archive.read("adjust_lr", rate);
  adjust_lr(static_cast<MuonRate>(rate.toInt()));
}

void MuonParamState::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(momentum_buffer);
}

void MuonParamState::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(at::Tensor, momentum_buffer);
}

namespace {

void require_matrices(const std::vector<at::Tensor>& parameters) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i].dim() != 2) {
      throw UsageError(
          fmt::format("Muon: parameter {} of its group has shape [{}]; Muon supports matrices only; use an optimizer "
                      "like AdamW for others, or MuonWithAdamW for all",
                      i, fmt::join(parameters[i].sizes(), ", ")));
    }
  }
}

const Muon::ParamGroups& checked(const Muon::ParamGroups& groups) {
  for (const auto& group : groups) require_matrices(group.params());
  return groups;
}

// Approximates u vT for a matrix u s vT, in bfloat16.
at::Tensor orthogonal(const at::Tensor& matrix, const MuonOptions& options) {
  const auto [a, b, c] = options.ns_coefficients();
  const bool tall = matrix.size(0) > matrix.size(1);
  auto x = matrix.to(at::kBFloat16);
  // Products of the short side are cheaper.
  if (tall) x = x.t();
  x = x / x.norm().clamp_min(options.eps());
  for (int64_t i = 0; i < options.ns_steps(); ++i) {
    const auto gram = at::mm(x, x.t());
    x = at::addmm(x, at::addmm(gram, gram, gram, b, c), x, a);
  }
  return tall ? x.t() : x;
}

double rate(const at::Tensor& parameter, const MuonOptions& options) {
  const auto n = static_cast<double>(parameter.size(0)), m = static_cast<double>(parameter.size(1));
  if (options.adjust_lr() == MuonRate::match_rms_adamw) return 0.2 * options.lr() * std::sqrt(std::max(n, m));
  return options.lr() * std::sqrt(std::max(1.0, n / m));
}

}  // namespace

Muon::Muon(const ParamGroups& groups, MuonOptions defaults) : OptimizerBase(checked(groups), std::move(defaults)) {}

Muon::Muon(std::vector<at::Tensor> parameters, MuonOptions defaults)
    : Muon(ParamGroups{torch::optim::OptimizerParamGroup(std::move(parameters))}, std::move(defaults)) {}

void Muon::add_param_group(const torch::optim::OptimizerParamGroup& group) {
  require_matrices(group.params());
  OptimizerBase::add_param_group(group);
}

at::Tensor Muon::step(LossClosure closure) {
  const torch::NoGradGuard no_grad;
  auto loss = evaluate(closure);
  // Checked again, because groups can be changed or added through the base class.
  checked(param_groups_);
  const auto groups = collect_updates(*this, "Muon");
  check_states(groups, [](const at::Tensor& parameter, const MuonParamState& state, const MuonOptions&) {
    require_state(state.momentum_buffer(), "momentum_buffer", parameter.sizes(), parameter, "Muon");
  });
  for (size_t i = 0; i < groups.size(); ++i) {
    const auto& options = options_of(i);
    for (const auto& [parameter, gradient] : groups[i]) {
      if (parameter.numel() == 0) continue;
      const auto& momentum = state_of(parameter, [&, &p = parameter] {
                               return MuonParamState().momentum_buffer(at::zeros_like(p));
                             }).momentum_buffer();
      momentum.lerp_(gradient, 1 - options.momentum());
      const auto change =
          orthogonal(options.nesterov() ? gradient.lerp(momentum, options.momentum()) : momentum, options);
      parameter.mul_(1 - options.lr() * options.weight_decay()).sub_(change, rate(parameter, options));
    }
  }
  return loss;
}

}  // namespace shoal
