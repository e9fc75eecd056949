#include "engine/sharded/outdated_parameters.h"

#include <fmt/format.h>

#include "engine/sharded/early_use.h"
#include "shoal/error.h"

namespace shoal {

void OutdatedParameters::add(const std::string& name, const at::Tensor& parameter) {
  errors_.push_back(fmt::format("parameter {} {}", name, about_early_use));
  first_touch_.arm(errors_.size() - 1, parameter, errors_.back());
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
