#pragma once
// A loss scale that all ranks come to have, although none waits for another one.

#include <deque>

#include "shoal/precision.h"
#include "strategy/decentralized/known_ranks.h"

namespace shoal {

// A scale follows from the steps in which some rank's gradients have overflowed. A rank hears of the others' a few steps
// later, and then computes the scale anew from before that step on. So ranks that know the same have the same scale.
class CommonScale {
 public:
  explicit CommonScale(GradScaler& scaler) : scaler_(scaler) {}
  // This rank's step, shown as `version`, is over.
  void step(int64_t version, const KnownRanks& known);

 private:
  struct Step {
    int64_t version;
    bool overflowed;  // somewhere, as far as is known
  };
  GradScaler& scaler_;
  GradScalerState base_{};    // before `recent_`
  GradScalerState latest_{};  // after it; another one has been loaded if the scaler's differs
  std::deque<Step> recent_;
};

}  // namespace shoal
