#include "strategy/fsdp/ignored.h"

#include <fmt/format.h>
#include <torch/utils.h>

#include <algorithm>

#include "comm/store/warn.h"
#include "shoal/error.h"

namespace shoal {
namespace {

using Named = std::vector<std::pair<std::string, at::Tensor>>;

Named tensors_of(const torch::nn::Module& module) {
  Named list;
  for (const auto& entry : module.named_parameters()) list.emplace_back(entry.key(), entry.value());
  for (const auto& entry : module.named_buffers()) list.emplace_back(entry.key(), entry.value());
  return list;
}

void require_not_sharded(const char* option, const std::string& given, const std::string& name,
                         const at::Tensor& tensor) {
  const auto found = find_registration(tensor);
  if (!found || found->ignored) return;
  throw UsageError(
      fmt::format("FullyShardedDataParallel: {}: '{}' cannot be ignored, because {} is already sharded by a wrapper of "
                  "its own; remove it from {}: parameters of such a wrapper are skipped automatically",
                  option, given, name, option));
}

std::vector<std::string> names_in(const torch::nn::Module& module, const std::string& ignored_module) {
  if (ignored_module.empty()) {
    warn("FullyShardedDataParallel: ignored_modules names the module itself (''): all of its parameters are ignored");
  }
  const auto modules = module.named_modules("", /*include_self=*/false);
  if (!ignored_module.empty() && !modules.contains(ignored_module)) {
    throw UsageError(fmt::format("FullyShardedDataParallel: ignored_modules: the module has no sub-module named '{}'",
                                 ignored_module));
  }
  const auto& ignored = ignored_module.empty() ? module : *modules[ignored_module];
  std::vector<std::string> names;
  for (const auto& [key, tensor] : tensors_of(ignored)) {
    names.push_back(ignored_module.empty() ? key : ignored_module + "." + key);
    require_not_sharded("ignored_modules", ignored_module, names.back(), tensor);
  }
  return names;
}

}  // namespace

std::vector<std::string> ignored_names(const torch::nn::Module& module,
                                       const FullyShardedDataParallelOptions& options) {
  auto names = options.ignored_parameters;
  const auto tensors = tensors_of(module);
  for (const auto& [name, tensor] : tensors) {
    if (std::find(names.begin(), names.end(), name) == names.end()) continue;
    require_not_sharded("ignored_parameters", name, name, tensor);
  }
  for (const auto& ignored : options.ignored_modules) {
    for (auto& name : names_in(module, ignored)) names.push_back(std::move(name));
  }
  const auto parts = parts_of(module);
  size_t registered_parameters = 0;
  bool any_sharded = false;
  const auto parameters = module.parameters();
  for (const auto& parameter : parameters) {
    const auto found = find_registration_within(parameter, parts);
    registered_parameters += found ? 1 : 0;
    any_sharded = any_sharded || (found && !found->ignored);
  }
  if (any_sharded && registered_parameters == parameters.size()) {
    throw UsageError(
        "FullyShardedDataParallel: the module is already sharded; call unwrap() of the wrapper that shards it, or let "
        "go of it, to wrap it again");
  }
  for (const auto& [name, tensor] : tensors) {
    if (find_registration_within(tensor, parts)) names.push_back(name);
  }
  return names;
}

std::vector<FullyShardedCore*> wrappers_within(const torch::nn::Module& module, const FullyShardedCore& outer) {
  const auto parts = parts_of(module);
  std::vector<FullyShardedCore*> wrappers;
  for (const auto& parameter : module.parameters()) {
    const auto found = find_registration_within(parameter, parts);
    if (!found || found->ignored || found->by == &outer) continue;
    if (std::find(wrappers.begin(), wrappers.end(), found->by) == wrappers.end()) wrappers.push_back(found->by);
  }
  return wrappers;
}

}  // namespace shoal
