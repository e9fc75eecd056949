#pragma once
// Which parts of a module become units of their own: what is gathered, and let go of, together.

#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace shoal {

// Names the sub-modules (as named_modules() does) that become units. A parameter belongs to the innermost of them that
// holds it; what is left over makes one unit. Must answer alike on all ranks.
using WrapPolicy = std::function<std::vector<std::string>(const torch::nn::Module& root)>;

// Sub-modules for which `predicate(name, module)` holds.
WrapPolicy wrap_if(std::function<bool(const std::string& name, const torch::nn::Module& module)> predicate);

// Sub-modules of one of these types: wrap_type<BlockImpl>(), also wrap_type<torch::nn::TransformerEncoderLayerImpl>().
template <class... Types>
WrapPolicy wrap_type() {
  return wrap_if([](const std::string&, const torch::nn::Module& module) {
    return ((dynamic_cast<const Types*>(&module) != nullptr) || ...);
  });
}

// From the leaves up, every sub-module that holds at least `min_num_params` elements that are in no unit yet (torch's
// size_based_auto_wrap_policy). UsageError below 1.
WrapPolicy wrap_size(int64_t min_num_params);

// These sub-modules. UsageError, when it is applied, for a name that the module does not have.
WrapPolicy wrap_names(std::vector<std::string> names);

}  // namespace shoal
