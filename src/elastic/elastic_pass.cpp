// Passes through the samples: where a rank's loop is, and whether the others are there, too.

#include <fmt/format.h>

#include "elastic/elastic_state.h"

namespace shoal {

bool Elastic::State::begin_epoch() {
  if (!arrival.in_place && sampler->epoch() != arrival.job_epoch) {
    generations->resign();
    throw UsageError(
        fmt::format("Elastic: this newcomer's loop begins with epoch {}, and the job is in epoch {}: begin it "
                    "with first_epoch(), and call sampler.set_epoch() before in_epoch()",
                    sampler->epoch(), arrival.job_epoch));
  }
  position.asks = arrival.in_place = true;
  begin_loop();
  const bool inside = position.is_in(sampler->epoch());
  if (!inside) position.begin_pass(sampler->consumed());
  // A rank that has finished its last step of a pass in a recovery finds samples left where the loop leaves some.
  const bool begins = (!inside || position.outdated) && position.pass > position.passes_over;
  divide(position.taken);
  position.outdated = false;
  position.epoch = sampler->epoch();
  if (begins && sampler->num_samples() > 0) return true;
  position.epoch.reset();
  divide(0);
  return false;
}

void Elastic::State::follow_epoch() {
  if (sampler == nullptr || !position.epoch || position.is_in(sampler->epoch())) return;
  position.change_epoch(sampler->epoch());
  batch.begin_epoch();
}

// Newcomers may be why: their loops count anew.
void Elastic::State::require_one_pass(const Extent& passes, const Extent& epochs) {
  if (!passes.differs() && !epochs.differs()) return;
  trial.ranks_differ = can_blame();
  current_step.ready = Ready::no;
  if (passes.differs()) {
    throw UsageError(fmt::format(
        "Elastic: ranks are in passes {} to {} through their samples, and this one is in pass {}: call step() equally "
        "often in each pass, and in_epoch() alike, on all ranks",
        passes.least(), passes.most, position.pass));
  }
  throw UsageError(fmt::format(
      "Elastic: ranks are in epochs {} to {} of their samplers, and this one is in epoch {}: all ranks must call "
      "set_epoch() alike; a newcomer's loop begins with first_epoch(), and what it counts within an epoch must follow "
      "from steps()",
      epochs.least(), epochs.most, sampler->epoch()));
}

}  // namespace shoal
