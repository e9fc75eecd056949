#pragma once
// A module's parameters, divided into units.

#include <optional>
#include <string>
#include <vector>

#include "module/walk.h"
#include "shoal/wrap_policy.h"

namespace shoal {

struct Unit {
  std::string name;                     // of the sub-module; "" for what is left over
  std::vector<NamedTensor> parameters;  // in registration order, frozen ones included
};

// Units in the order in which forward is expected to come to them: that of their first parameter's registration. Units
// without parameters are left out. A tensor with several names belongs where it has its first.
std::vector<Unit> divide(const torch::nn::Module& module, const ModuleTensors& tensors,
                         const std::optional<WrapPolicy>& policy);

}  // namespace shoal
