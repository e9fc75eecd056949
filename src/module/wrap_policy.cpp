#include "shoal/wrap_policy.h"

#include <fmt/format.h>
#include <torch/types.h>

#include <set>

#include "shoal/error.h"

namespace shoal {
namespace {

std::string join(const std::string& prefix, const std::string& name) {
  return prefix.empty() ? name : prefix + "." + name;
}

// Returns the number of elements under `module` that are in no unit; a tensor with several names counts once.
int64_t wrap_large(const torch::nn::Module& module, const std::string& name, int64_t least,
                   std::set<const c10::TensorImpl*>& seen, std::vector<std::string>& units) {
  int64_t numel = 0;
  for (const auto& child : module.named_children()) {
    numel += wrap_large(*child.value(), join(name, child.key()), least, seen, units);
  }
  for (const auto& parameter : module.parameters(/*recurse=*/false)) {
    if (seen.insert(parameter.unsafeGetTensorImpl()).second) numel += parameter.numel();
  }
  if (name.empty() || numel < least) return numel;
  units.push_back(name);
  return 0;
}

}  // namespace

WrapPolicy wrap_if(std::function<bool(const std::string& name, const torch::nn::Module& module)> predicate) {
  return [predicate = std::move(predicate)](const torch::nn::Module& root) {
    std::vector<std::string> units;
    for (const auto& entry : root.named_modules("", /*include_self=*/false)) {
      if (predicate(entry.key(), *entry.value())) units.push_back(entry.key());
    }
    return units;
  };
}

WrapPolicy wrap_size(int64_t min_num_params) {
  if (min_num_params < 1) {
    throw UsageError(fmt::format("wrap_size: min_num_params {}; give at least 1 element", min_num_params));
  }
  return [min_num_params](const torch::nn::Module& root) {
    std::vector<std::string> units;
    std::set<const c10::TensorImpl*> seen;
    wrap_large(root, "", min_num_params, seen, units);
    return units;
  };
}

WrapPolicy wrap_names(std::vector<std::string> names) {
  return [names = std::move(names)](const torch::nn::Module& root) {
    const auto modules = root.named_modules("", /*include_self=*/false);
    for (const auto& name : names) {
      if (!modules.contains(name)) {
        throw UsageError(fmt::format("wrap_names: the module has no sub-module named '{}'", name));
      }
    }
    return names;
  };
}

}  // namespace shoal
