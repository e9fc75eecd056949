#pragma once
// Parameters that have not got the last updates of other ranks.

#include <string>
#include <utility>
#include <vector>

#include "engine/paging/first_touch.h"

namespace shoal {

// Where ranks share no memory, those of an elastic job with second owners send each other what they have updated only
// behind the update, which must not communicate. To use a parameter before that is a UsageError, which all ranks get
// (early_use.h).
class OutdatedParameters {
 public:
  // Parameters with their names, which are outdated until end().
  void begin(const std::vector<std::pair<std::string, at::Tensor>>& parameters);
  // All are up to date, or their values will be replaced.
  void end();
  // The error of a use since the last call or update, which the program may have caught and gone on with former values;
  // empty: none.
  std::string take_early_use() { return std::exchange(early_use_, {}); }
  void forget_early_use() { early_use_.clear(); }

 private:
  void refuse(size_t number);

  std::vector<std::string> errors_;
  std::string early_use_;
  FirstTouch first_touch_{[this](size_t number) { refuse(number); }};
};

}  // namespace shoal
