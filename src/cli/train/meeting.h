#pragma once
// Meeting points of ranks that otherwise train at their own pace.

#include <cstdint>
#include <functional>

#include "shoal/training.h"

namespace shoal::cli {

// Ranks that average with neighbours are in different steps, and go on when some of them end. Before they do something
// together, an evaluation, a checkpoint or the end, also one that an interrupt asks for, all make as many steps as the
// rank that is furthest on. Of strategies whose ranks are always in the same step, nothing is asked.
class Meeting {
 public:
  Meeting(TrainingCore& training, Group group) : training_(training), group_(std::move(group)) {}

  enum class Outcome {
    go_on,     // with the next step; where others are further on, up to theirs
    together,  // all that are there are in this step
    stop       // the same, and one was interrupted
  };
  // After so many steps. due: something together comes after this step, on all ranks. stops: this rank was interrupted.
  // Collective when due, and from an interrupt on.
  Outcome meet(int64_t steps, bool due, bool stops);

  // Collective work of those that are there. When one ends meanwhile, the others begin it again without it.
  void together(const std::function<void(const Group& present)>& work);

 private:
  bool in_step() const { return training_.strategy().pace != Pace::own; }

  TrainingCore& training_;
  Group group_;
  int64_t appointed_ = -1;  // the step after which others wait
};

}  // namespace shoal::cli
