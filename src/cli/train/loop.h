#pragma once
// Position of a training in its loop.

#include "cli/train/train_log.h"
#include "cli/train/trainer.h"

namespace shoal::cli {

struct Trainer::Loop {
  int64_t first;   // number of the first step
  int64_t number;  // of the next step
  TrainLog log;
  int64_t under_strategy = 0;  // steps that this rank has made under the present strategy, whose wrapper counts them
  // Elastic training.
  Stage stage = Stage::step;
  bool divided_anew = false;
  int64_t per_epoch = 0;   // steps, with the present ranks
  int64_t evaluated = -1;  // number of steps at the last evaluation
  bool has_come = false;   // to a running job, whose steps it still counts by its former ranks
};

}  // namespace shoal::cli
