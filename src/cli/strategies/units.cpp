#include "cli/strategies/units.h"

#include <algorithm>

namespace shoal::cli {

WrapPolicy unit_policy(const std::string& model) {
  return wrap_if([gpt = model == "gpt"](const std::string& name, const torch::nn::Module&) {
    const auto depth = std::count(name.begin(), name.end(), '.');
    return gpt ? depth == 1 && name.starts_with("blocks.") : depth == 0;
  });
}

}  // namespace shoal::cli
