#pragma once
// Settings that must be equal on all ranks of an elastic job.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "elastic/elastic_parts.h"

namespace shoal {

// Learning rate and other options of each param group, and, where every rank holds all parameters, some elements of
// them. A newcomer begins with the job's, and its program may change them in another way.
class Comparison {
 public:
  // Made at a step's begin: its first function may change parameters until the second one. step: whose elements are
  // taken, other ones in each step. The same on all ranks.
  Comparison(const ElasticParts& parts, int64_t step);
  // Before the comparison: the first function may have set them.
  void add_options(const ElasticParts& parts);

  // Each value, and minus it, for one maximum over the ranks.
  std::vector<double> values() const;
  // What differs, in words; empty: nothing. most: the maxima of values().
  std::string difference(const std::vector<double>& most) const;

 private:
  enum class Kind { rate, options, element };
  struct Value {
    Kind kind;
    double value;
    double relative;   // difference that rounding may explain
    std::string what;  // param group, or name of the parameter
    std::string options;
  };
  void add_elements(const std::vector<NamedTensor>& parameters, int64_t step);

  std::vector<Value> compared_;
};

}  // namespace shoal
