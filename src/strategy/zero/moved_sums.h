#pragma once
// Sums of gradients whose parameters have another owner now.

#include <unordered_map>
#include <vector>

#include "engine/reducer/reducer.h"

namespace shoal {

using Owners = std::unordered_map<const c10::TensorImpl*, int>;  // by parameter

Owners owners_by_parameter(const std::vector<Gradient>& gradients, const std::vector<int>& owners);

// Sends the sums in `left` from the parameters' old owners to their new ones. Collective.
void move_sums(const Group& group, const Reducer& reducer, const Owners& from, const Owners& to,
               AccumulatedGradients::Left& left);

}  // namespace shoal
