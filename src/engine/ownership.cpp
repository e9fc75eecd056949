#include "engine/ownership.h"

#include <algorithm>

namespace shoal {

void assign_owners(const std::vector<at::Tensor>& parameters, int ranks, std::vector<int>& owners) {
  std::vector<int64_t> load(ranks);
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (owners[i] >= 0) load[owners[i]] += parameters[i].numel();
  }
  for (size_t i = parameters.size(); i-- > 0;) {
    if (owners[i] >= 0) continue;
    const auto least = std::min_element(load.begin(), load.end());
    *least += parameters[i].numel();
    owners[i] = static_cast<int>(least - load.begin());
  }
}

}  // namespace shoal
