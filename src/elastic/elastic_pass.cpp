// Passes through the samples: where a rank's loop is, and whether the others are there, too.

#include <fmt/format.h>

#include "elastic/elastic_state.h"

namespace shoal {

bool Elastic::State::begin_epoch() {
  if (!in_place && sampler->epoch() != job_epoch) {
    generations->resign();
    throw UsageError(
        fmt::format("Elastic: this newcomer's loop begins with epoch {}, and the job is in epoch {}: begin it "
                    "with first_epoch(), and call sampler.set_epoch() before in_epoch()",
                    sampler->epoch(), job_epoch));
  }
  asks = in_place = true;
  begin_loop();
  const bool inside = epoch && *epoch == sampler->epoch();
  if (!inside) {
    ++pass;
    taken = sampler->consumed();
    skipped = 0;
  }
  // A rank that has finished its last step of a pass in a recovery finds samples left where the loop leaves some.
  const bool begins = (!inside || outdated) && pass > passes_over;
  divide(taken);
  outdated = false;
  epoch = sampler->epoch();
  if (begins && sampler->num_samples() > 0) return true;
  epoch.reset();
  divide(0);
  return false;
}

void Elastic::State::follow_epoch() {
  if (sampler == nullptr || !epoch || *epoch == sampler->epoch()) return;
  epoch = sampler->epoch();
  taken = skipped = 0;
  batch.begin_epoch();
}

// Newcomers may be why: their loops count anew.
void Elastic::State::require_one_pass(const std::vector<double>& most) {
  const bool same_pass = most[0] == -most[1];
  if (same_pass && most[2] == -most[3]) return;
  differ = can_blame();
  ready = Ready::no;
  if (!same_pass) {
    throw UsageError(fmt::format(
        "Elastic: ranks are in passes {} to {} through their samples, and this one is in pass {}: call step() equally "
        "often in each pass, and in_epoch() alike, on all ranks",
        -most[1], most[0], pass));
  }
  throw UsageError(fmt::format(
      "Elastic: ranks are in epochs {} to {} of their samplers, and this one is in epoch {}: all ranks must call "
      "set_epoch() alike; a newcomer's loop begins with first_epoch(), and what it counts within an epoch must follow "
      "from steps()",
      -most[3], most[2], sampler->epoch()));
}

}  // namespace shoal
