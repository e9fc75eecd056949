#pragma once
// State of a Reducer's step: made when the step begins, destroyed when it ends or is abandoned.

#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/group/coalesce.h"
#include "engine/buckets/bucket_schedule.h"
#include "engine/gradients/dropped_forwards.h"

namespace shoal {

// State of a step before its first gradient, from the first forward on.
struct StepEntry {
  bool begun = false;     // by a micro-batch under no_sync
  bool expected = false;  // peers will finish the step or wait for it
  bool failed = false;    // this rank cannot finish it
  bool holding = false;   // its sums are held back
  DroppedForwards forwards{};
};

// Results of the previous step.
struct LastStep {
  explicit LastStep(size_t gradients) : used_anywhere(gradients) {}

  std::vector<bool> used_anywhere;        // by gradient
  std::vector<std::string> unused_names;  // parameters of a pending error
  std::string apart;                      // why ranks are in different steps, for good; empty: they are not
  std::exception_ptr hook_error;          // of the last step that a communication hook ended from here
  bool missed = false;      // an earlier step, whose sums the other ranks have used: see Step::interrupted
  bool same_on_all = true;  // all ranks used the same gradients, as far as is known
};

struct Step {
  enum class From { backward, no_batch, caller };

  Step(From from, const BucketSet& buckets, const BucketSchedule::Limits& limits, bool may_wait)
      : from(from),
        schedule(buckets, limits, may_wait),
        sparse(buckets.size()),
        untouched(buckets.places().size()),
        used_anywhere(buckets.places().size()),
        came_anywhere(buckets.places().size()) {}

  From from;               // caller: not representative of which gradients steps use, and in what order
  bool early = false;      // the consumer takes buckets while backward runs
  bool behind = false;     // some ranks have dropped a forward, and others have used all of theirs
  bool abandoned = false;  // a bucket meant for the consumer was abandoned
  // An exception that is this rank's alone has left the wait for its sums: a signal handler's. The other ranks do not
  // know, and use them.
  bool interrupted = false;
  bool given_up = false;  // its gradients: see Reducer::give_up_gradients(); the program may have changed them since

  BucketSchedule schedule;
  std::vector<std::optional<SparseSum>> sparse;  // by bucket
  Work trailer_work;
  std::optional<double> weight{};  // sum of the ranks' weights, once all sums are here; NaN: a rank abandoned the step
  std::shared_ptr<std::function<void()>> issues_last{};  // see Reducer::waits_for_end()

  // By gradient.
  std::vector<at::Tensor> untouched;  // former grad() that this rank did not touch, to be restored if no rank did
  std::vector<bool> used_anywhere;
  std::vector<bool> came_anywhere;

  std::exception_ptr hook_error;  // exception of a communication hook at the end of the step
};

}  // namespace shoal
