#include "optim/param_groups.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/optim/lbfgs.h>
#include <torch/utils.h>

#include <algorithm>
#include <typeinfo>

#include "optim/named_options.h"
#include "shoal/error.h"

namespace shoal {

using torch::optim::OptimizerParamGroup;

namespace {

std::string shape(const at::Tensor& parameter) {
  return fmt::format("[{}]", fmt::join(parameter.sizes(), ", "));
}

bool same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const at::Tensor& one, const at::Tensor& other) { return one.is_same(other); });
}

bool holds(const std::vector<at::Tensor>& list, const at::Tensor& parameter) {
  return std::any_of(list.begin(), list.end(), [&](const at::Tensor& other) { return other.is_same(parameter); });
}

}  // namespace

ParamGroups empty_like(const ParamGroups& groups) {
  ParamGroups empty;
  for (const auto& group : groups) {
    empty.emplace_back(std::vector<at::Tensor>());
    if (group.has_options()) empty.back().set_options(group.options().clone());
  }
  return empty;
}

std::unique_ptr<torch::optim::Optimizer> make_local(
    const std::function<std::unique_ptr<torch::optim::Optimizer>(const ParamGroups&)>& make, const ParamGroups& share,
    const torch::optim::OptimizerOptions& defaults, const std::string& name) {
  for (size_t number = 0; number < share.size(); ++number) {
    if (!share[number].has_options()) continue;
    const auto& own = share[number].options();
    if (typeid(own) == typeid(defaults)) continue;
    throw UsageError(fmt::format(
        "{}: the options of param group {} are of type {}, those of the optimizer of type {}; use the same type", name,
        number, type_of(share[number].options()), type_of(defaults)));
  }
  std::unique_ptr<torch::optim::Optimizer> local;
  try {
    local = make(share);
  } catch (const c10::Error& error) {
    throw UsageError(fmt::format("{}: {}", name, error.what_without_backtrace()));
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {  // of an optimizer of the program's own
    throw UsageError(fmt::format("{}: {}", name, error.what()));
  }
  if (dynamic_cast<const torch::optim::LBFGS*>(local.get()) != nullptr) {
    throw UsageError(
        name +
        ": L-BFGS is not supported, because it needs all parameters on one rank and evaluates its closure several "
        "times per step; use it with DistributedDataParallel, and return from the closure the mean of the loss over "
        "ranks (world.all_reduce(loss, ReduceOp::avg)), so that all take the same steps");
  }
  return local;
}

void copy_options(const ParamGroups& from, ParamGroups& to) {
  for (size_t number = 0; number < to.size(); ++number) to[number].set_options(from[number].options().clone());
}

void refuse_archive(const std::string& name) {
  throw UsageError(name +
                   ": torch::save and torch::load would only handle this rank's share of the state; use shoal::save "
                   "and shoal::load (shoal/checkpoint.h), or state_dict() and load_state_dict(), on every rank");
}

std::vector<std::string> describe(const ParamGroups& groups) {
  std::vector<std::string> lines;
  for (size_t number = 0; number < groups.size(); ++number) {
    lines.push_back(fmt::format("param group {}: {}", number, describe(groups[number].options())));
    for (const auto& parameter : groups[number].params()) {
      lines.push_back(fmt::format("parameter {} {}{}", c10::toString(parameter.scalar_type()), shape(parameter),
                                  parameter.requires_grad() ? "" : " frozen"));
    }
  }
  return lines;
}

KnownParameters::KnownParameters(const ParamGroups& groups) {
  for (const auto& group : groups) groups_.push_back(group.params());
}

std::string KnownParameters::change(const ParamGroups& now) const {
  for (size_t number = 0; number < std::max(groups_.size(), now.size()); ++number) {
    if (number >= now.size()) return fmt::format("param group {} was taken away", number);
    const auto& list = now[number].params();
    if (number >= groups_.size()) {
      return list.empty() ? fmt::format("param group {} was added", number)
                          : fmt::format("param group {} with a parameter {} was added", number, shape(list.front()));
    }
    const auto& before = groups_[number];
    if (same(before, list)) continue;
    for (const auto& parameter : list) {
      if (!holds(before, parameter)) {
        return fmt::format("a parameter {} was added to param group {}", shape(parameter), number);
      }
    }
    for (const auto& parameter : before) {
      if (!holds(list, parameter)) {
        return fmt::format("a parameter {} was taken from param group {}", shape(parameter), number);
      }
    }
  }
  return "";
}

}  // namespace shoal
