#include "engine/sharded/outdated_parameters.h"

#include <fmt/format.h>

#include "engine/sharded/early_use.h"
#include "shoal/error.h"

namespace shoal {

void OutdatedParameters::begin(const std::vector<std::pair<std::string, at::Tensor>>& parameters) {
  // All texts first: another thread may use what is armed already.
  for (const auto& [name, parameter] : parameters) {
    errors_.push_back(fmt::format("parameter {} {}", name, about_early_use));
  }
  for (size_t number = 0; number < parameters.size(); ++number) {
    first_touch_.arm(number, parameters[number].second, errors_[number]);
  }
}

void OutdatedParameters::end() {
  first_touch_.disarm();
  errors_.clear();
}

void OutdatedParameters::refuse(size_t number) {
  early_use_ = errors_[number];
  throw UsageError(early_use_);
}

}  // namespace shoal
