#include "module/known_module.h"

#include <fmt/format.h>

#include <algorithm>

#include "shoal/error.h"

namespace shoal {
namespace {

// named_parameters() would compose a name for each parameter, which takes twenty times as long.
template <class Act>
void each_parameter(const torch::nn::Module& module, const Act& act) {
  for (const auto& parameter : module.parameters(/*recurse=*/false)) act(parameter);
  for (const auto& child : module.children()) each_parameter(*child, act);
}

}  // namespace

KnownModule::KnownModule(std::shared_ptr<const torch::nn::Module> module, std::string owner)
    : module_(std::move(module)), owner_(std::move(owner)) {
  each_parameter(*module_, [&](const at::Tensor& parameter) { parameters_.push_back(parameter); });
}

void KnownModule::require_no_other() const {
  if (!module_) return;
  size_t number = 0;
  bool other = false;
  each_parameter(*module_, [&](const at::Tensor& parameter) {
    other = other || number >= parameters_.size() || !parameter.is_same(parameters_[number]);
    ++number;
  });
  if (!other) return;
  for (const auto& entry : module_->named_parameters()) {
    const auto& parameter = entry.value();
    const auto same = [&](const at::Tensor& known) { return known.is_same(parameter); };
    if (!parameter.requires_grad() || std::any_of(parameters_.begin(), parameters_.end(), same)) continue;
    throw UsageError(
        fmt::format("{0}: the module has a new parameter {1}, which {0} would not synchronise; construct {0} again "
                    "after changing the module{2}",
                    owner_, entry.key(), owner_ == "FullyShardedDataParallel" ? " (and call unwrap() before)" : ""));
  }
}

}  // namespace shoal
