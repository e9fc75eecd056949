#include "optim/updates.h"

#include <c10/util/Type.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <typeinfo>
#include <unordered_set>

#include "shoal/detail/optimizer_base.h"
#include "shoal/error.h"

namespace shoal {
namespace {

Update checked(const at::Tensor& parameter, const std::string& optimizer) {
  const auto& gradient = parameter.grad();
  if (!parameter.is_floating_point()) {
    throw UsageError(fmt::format("{}: a parameter has dtype {}; only floating-point parameters can be trained",
                                 optimizer, c10::toString(parameter.scalar_type())));
  }
  if (gradient.layout() != at::kStrided) {
    throw UsageError(fmt::format("{}: sparse gradients are not supported; use SGD or Adagrad of libtorch", optimizer));
  }
  return {parameter, gradient.to(parameter.scalar_type())};
}

}  // namespace

at::Tensor evaluate(const torch::optim::Optimizer::LossClosure& closure) {
  if (closure == nullptr) return {};
  const at::AutoGradMode grad(true);
  return closure();
}

std::vector<std::vector<Update>> collect_updates(const torch::optim::Optimizer& of, const std::string& optimizer) {
  std::vector<std::vector<Update>> groups;
  for (const auto& group : of.param_groups()) {
    auto& updates = groups.emplace_back();
    for (const auto& parameter : group.params()) {
      if (parameter.grad().defined()) updates.push_back(checked(parameter, optimizer));
    }
  }
  return groups;
}

std::vector<UpdateRun> collect_aligned_updates(const torch::optim::Optimizer& of, const std::string& optimizer) {
  auto groups = collect_updates(of, optimizer);
  std::vector<UpdateRun> runs;
  for (size_t i = 0; i < groups.size(); ++i) {
    runs.push_back({i, {}});
    std::unordered_set<const c10::TensorImpl*> seen;
    for (auto& [parameter, gradient] : groups[i]) {
      if (!parameter.is_non_overlapping_and_dense()) {
        throw UsageError(
            optimizer +
            ": a parameter has gaps in memory; clone it, or use libtorch's optimizer without Fused in the name");
      }
      if (!seen.insert(parameter.unsafeGetTensorImpl()).second) {
        runs.push_back({i, {}});
        seen = {parameter.unsafeGetTensorImpl()};
      }
      runs.back().updates.push_back({parameter, aligned(gradient, parameter)});
    }
  }
  return runs;
}

void detail::refuse_state(const torch::optim::Optimizer& of, const at::Tensor& parameter) {
  const auto name = c10::demangle(typeid(of).name());
  const auto& groups = of.param_groups();
  std::string place = "a parameter";
  for (size_t group = 0; group < groups.size(); ++group) {
    const auto& all = groups[group].params();
    const auto found = std::find_if(all.begin(), all.end(), [&](const auto& one) { return one.is_same(parameter); });
    if (found == all.end()) continue;
    place = fmt::format("parameter {} of param group {}", found - all.begin(), group);
    break;
  }
  throw UsageError(
      fmt::format("{}: the state of {} [{}] is that of another optimizer: take the one that it was made by, or begin "
                  "with new state",
                  name, place, fmt::join(parameter.sizes(), ", ")));
}

void require_shape(const at::Tensor& state, const char* what, const at::Tensor& parameter,
                   const std::string& optimizer) {
  if (state.defined()) require_state(state, what, parameter.sizes(), parameter, optimizer);
}

void require_state(const at::Tensor& state, const char* what, at::IntArrayRef shape, const at::Tensor& parameter,
                   const std::string& optimizer) {
  if (state.defined() && state.sizes() == shape) return;
  const auto fault =
      state.defined() ? fmt::format("has the shape [{}]", fmt::join(state.sizes(), ", ")) : "is not there";
  throw UsageError(fmt::format("{}: {} of a parameter [{}] {}: it was loaded from another model; begin with new state",
                               optimizer, what, fmt::join(parameter.sizes(), ", "), fault));
}

at::Tensor aligned(at::Tensor& state, const at::Tensor& parameter) {
  const bool fits = state.strides() == parameter.strides() && state.scalar_type() == parameter.scalar_type() &&
                    state.device() == parameter.device();
  if (!fits) state = at::empty_like(parameter).copy_(state);
  return state;
}

}  // namespace shoal
