#include "module/units.h"

#include <algorithm>
#include <unordered_map>

namespace shoal {
namespace {

bool inside(const std::string& parameter, const std::string& module) {
  return module.empty() || (parameter.size() > module.size() && parameter[module.size()] == '.' &&
                            parameter.compare(0, module.size(), module) == 0);
}

}  // namespace

std::vector<Unit> divide(const torch::nn::Module& module, const ModuleTensors& tensors,
                         const std::optional<WrapPolicy>& policy) {
  auto names = policy ? (*policy)(module) : std::vector<std::string>();
  // Innermost first: a nested name is longer than the enclosing one.
  std::stable_sort(names.begin(), names.end(),
                   [](const std::string& a, const std::string& b) { return a.size() > b.size(); });
  names.emplace_back();
  std::vector<Unit> units;
  std::unordered_map<std::string, size_t> place;
  for (const auto& parameter : tensors.parameters) {
    const auto name = *std::find_if(names.begin(), names.end(),
                                    [&](const std::string& candidate) { return inside(parameter.name, candidate); });
    const auto [found, fresh] = place.try_emplace(name, units.size());
    if (fresh) units.push_back({name, {}});
    units[found->second].parameters.push_back(parameter);
  }
  return units;
}

}  // namespace shoal
