#pragma once
// Checkpoints of a run of `shoal train`: the one that it goes on from, and those that it saves.

#include <cstdint>
#include <optional>
#include <string>

#include "cli/train/feed.h"
#include "cli/train/train_options.h"
#include "shoal/checkpoint.h"
#include "shoal/schedules.h"
#include "shoal/training.h"

namespace shoal::cli {

class Checkpoints {
 public:
  // Both outlive the object.
  Checkpoints(const TrainOptions& options, const Feed& feed) : options_(options), feed_(feed) {}

  // Takes the state of this strategy and schedule, if any, in place of the former ones; there is none without --save
  // and
  // --resume, or if the strategy has none. Waits for a save in the background.
  void take_state(TrainingCore& training, LambdaLR* schedule);
  // The same without another state; throws the error of that save. Collective.
  void leave_state();
  bool has_state() const { return state_.has_value(); }

  // Loads what --resume names, and sets the schedule's position. Returns the number of the first step; total_steps or
  // more: that training is done. says: prints where it goes on. Collective.
  int64_t resume(int64_t total_steps, LambdaLR* schedule, bool says);
  // The run begins anew: see keep_earlier_latest().
  void begin_anew();

  // Whether --save-every wants one after so many steps.
  bool is_due(int64_t steps) const;
  // Saves after so many steps. Collective.
  void save(int64_t steps);
  // The same while training goes on.
  void save_in_background(int64_t steps);
  // For the save in the background. Collective.
  void wait();
  // A run that begins anew in a folder of checkpoints, without --resume, may be a mistake until it has saved on its
  // own: if it is stopped before, `latest` stays the earlier run's. Returns that checkpoint; empty: there is none.
  std::string keep_earlier_latest(int64_t steps, bool leads) const;

 private:
  SaveOptions how_to_save(int64_t steps) const;

  const TrainOptions& options_;
  const Feed& feed_;
  std::optional<TrainingState> state_;
  std::optional<int64_t> earlier_latest_;  // step that `latest` named at the start, until this run has saved on its own
};

}  // namespace shoal::cli
