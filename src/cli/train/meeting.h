#pragma once
// Meeting points of ranks that otherwise train at their own pace.

#include <cstdint>
#include <functional>

#include "shoal/training.h"

namespace shoal::cli {

// Ranks that mix with neighbours are in different steps, and go on when some of them end. Before a joint action (an
// evaluation, a checkpoint, the end, or a stop after an interrupt) all ranks make as many steps as the one that is
// furthest ahead. For strategies whose ranks are always in the same step, no communication is needed.
class Meeting {
 public:
  Meeting(TrainingCore& training, Group group) : training_(training), group_(std::move(group)) {}

  enum class Outcome {
    go_on,     // continue with the next step, up to the furthest rank's if others are ahead
    together,  // all remaining ranks are in this step
    stop       // the same, and a rank was interrupted
  };
  // Call after `steps` steps. due: a joint action follows this step, on all ranks. stops: this rank was interrupted.
  // Collective if due, and from an interrupt on.
  Outcome meet(int64_t steps, bool due, bool stops);

  // Collective work of the remaining ranks. If one of them ends meanwhile, the others repeat the work without it.
  void together(const std::function<void(const Group& present)>& work);

 private:
  bool in_step() const { return training_.strategy().synchronization != Synchronization::asynchronous; }

  TrainingCore& training_;
  Group group_;
  int64_t appointed_ = -1;  // step after which the other ranks wait
};

}  // namespace shoal::cli
