#pragma once
// Loss scale that converges to one value on all ranks, although no rank waits for another.

#include <deque>
#include <vector>

#include "shoal/precision.h"
#include "strategy/decentralized/known_ranks.h"

namespace shoal {

// The scale is a function of the steps in which some rank's gradients overflowed. A rank hears of other ranks'
// overflows a few steps later, and then recomputes the scale from that step on. Ranks that know the same overflows have
// the same scale.
class CommonScale {
 public:
  struct Step {
    int64_t version = 0;
    bool overflowed = false;  // on some rank, as far as is known
  };
  // Steps that later news may still change, for a training that is resumed.
  struct Recent {
    GradScalerState before{};
    std::vector<Step> steps{};
  };

  explicit CommonScale(GradScaler& scaler) : scaler_(scaler) {}
  // Call when this rank's step, shown as `version`, is over.
  void step(int64_t version, const KnownRanks& known);
  Recent recent() const { return {base_, {recent_.begin(), recent_.end()}}; }
  // Call once the scaler has the state after these steps. If it has another one, they are of other options and do not
  // count.
  void resume(const Recent& recent);

 private:
  GradScaler& scaler_;
  GradScalerState base_{};    // state before `recent_`
  GradScalerState latest_{};  // state after it; if the scaler's differs, the caller has loaded another state
  std::deque<Step> recent_;
};

}  // namespace shoal
