#pragma once
// Collector of faults in an optimizer's options.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <string>
#include <vector>

#include "shoal/error.h"

namespace shoal {

class Faults {
 public:
  explicit Faults(std::string optimizer) : optimizer_(std::move(optimizer)) {}

  // `good` must be false for NaN.
  Faults& require(bool good, const char* option, double value, const char* wanted) {
    if (!good) faults_.push_back(fmt::format("{} is {}: give {}", option, value, wanted));
    return *this;
  }
  Faults& not_negative(const char* option, double value) {
    return require(value >= 0, option, value, "0 or a positive number");
  }
  Faults& below_one(const char* option, double value) {
    return require(value >= 0 && value < 1, option, value, "a number from 0 to below 1");
  }
  void raise() const {
    if (!faults_.empty()) throw UsageError(fmt::format("{}: {}", optimizer_, fmt::join(faults_, "; ")));
  }

 private:
  std::string optimizer_;
  std::vector<std::string> faults_;
};

}  // namespace shoal
