#pragma once
// State of the step in which a rank is.

#include <cstdint>
#include <optional>

#include "elastic/comparison.h"
#include "elastic/rank_progress.h"

namespace shoal {

struct StepInProgress {
  int64_t samples = 0;                   // of a share
  int64_t places = 0;                    // of the epoch that it takes
  int64_t reductions_before = 0;         // of the wrapper, when it began
  int64_t began_at = 0;                  // the wrapper's step then
  std::optional<Comparison> compared{};  // in a job that ranks have joined: this rank's when it began
  bool running = false;                  // step() has not returned
  bool unfinished = false;               // it has begun and is neither finished nor undone
  bool failed = false;                   // an update of this rank has thrown
  Ready ready = Ready::no;               // for it, or for the exchange after it
};

}  // namespace shoal
