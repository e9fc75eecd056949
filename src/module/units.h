#pragma once
// Units of a module's parameters.

#include <optional>
#include <string>
#include <vector>

#include "module/walk.h"
#include "shoal/wrap_policy.h"

namespace shoal {

struct Unit {
  std::string name;                     // name of the submodule; "" for the rest
  std::vector<NamedTensor> parameters;  // in registration order, including frozen ones
};

// Divides a module into units, in the order in which forward is expected to use them: by the registration of their
// first parameter. Omits units without parameters. A tensor with several names belongs to the unit of its first name.
std::vector<Unit> divide(const torch::nn::Module& module, const ModuleTensors& tensors,
                         const std::optional<WrapPolicy>& policy);

}  // namespace shoal
