#pragma once
// Measured values of one kind.

#include <vector>

namespace shoal {

// At least one value.
struct Samples {
  std::vector<double> values;

  double min() const;
  double median() const;
  double max() const;
};

}  // namespace shoal
