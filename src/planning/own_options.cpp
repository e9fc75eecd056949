#include "planning/own_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

namespace shoal {

TrainingOptions own_options(const std::string& of, const std::string& strategy, const std::vector<std::string>& all,
                            TrainingOptions options) {
  for (const auto& [name, value] : options.options) {
    const bool known = std::any_of(all.begin(), all.end(),
                                   [&, option = name](const auto& each) { return find_strategy(each).has(option); });
    if (!known) throw UsageError(fmt::format("{}: option {}: none of {} has it", of, name, fmt::join(all, ", ")));
  }
  std::erase_if(options.options, [&](const auto& entry) { return !find_strategy(strategy).has(entry.first); });
  return options;
}

}  // namespace shoal
