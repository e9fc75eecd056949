#pragma once
// Wrap policies: the sub-modules that FullyShardedDataParallel gathers and reshards as units.

#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace shoal {

// Function that returns the names of the sub-modules that become units (as in named_modules()). A parameter belongs to
// the innermost unit that contains it; the remaining parameters form one unit. The result must be equal on all ranks.
using WrapPolicy = std::function<std::vector<std::string>(const torch::nn::Module& root)>;

// Policy that selects the sub-modules for which `predicate(name, module)` is true.
WrapPolicy wrap_if(std::function<bool(const std::string& name, const torch::nn::Module& module)> predicate);

// Policy that selects the sub-modules of these types: wrap_type<BlockImpl>(),
// wrap_type<torch::nn::TransformerEncoderLayerImpl>().
template <class... Types>
WrapPolicy wrap_type() {
  return wrap_if([](const std::string&, const torch::nn::Module& module) {
    return ((dynamic_cast<const Types*>(&module) != nullptr) || ...);
  });
}

// Policy that selects, from the leaves up, every sub-module with at least `min_num_params` elements that are in no unit
// yet (size_based_auto_wrap_policy in PyTorch). Throws UsageError for a value below 1.
WrapPolicy wrap_size(int64_t min_num_params);

// Policy that selects sub-modules by name. Applying it throws UsageError for a name that the module does not have.
WrapPolicy wrap_names(std::vector<std::string> names);

}  // namespace shoal
