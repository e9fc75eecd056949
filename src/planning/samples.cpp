#include "planning/samples.h"

#include <algorithm>

namespace shoal {

double Samples::min() const {
  return *std::min_element(values.begin(), values.end());
}

double Samples::median() const {
  auto sorted = values;
  std::sort(sorted.begin(), sorted.end());
  const auto half = sorted.size() / 2;
  return sorted.size() % 2 == 1 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}

double Samples::max() const {
  return *std::max_element(values.begin(), values.end());
}

}  // namespace shoal
