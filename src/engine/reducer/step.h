#pragma once
// A step of the Reducer while it lasts: made when it begins, gone when it has ended or been abandoned.

#include <exception>
#include <optional>
#include <string>
#include <vector>

#include "engine/buckets/bucket_schedule.h"

namespace shoal {

// What is known of a step before it begins, from the first forward on that it follows.
struct StepEntry {
  bool expected = false;  // peers will finish it or wait for it
  bool failed = false;    // it cannot be finished on this rank
  bool holding = false;   // its sums are held back
};

// What the step before has left to say.
struct LastStep {
  explicit LastStep(size_t gradients) : used_anywhere(gradients) {}

  std::vector<bool> used_anywhere;        // by gradient
  std::vector<std::string> unused_names;  // of an error that is due
  bool alike = true;                      // all ranks used the same gradients, as far as is known
};

struct Step {
  enum class From { backward, no_batch, caller };

  Step(From from, const BucketSet& buckets, const BucketSchedule::Limits& limits, bool patient)
      : from(from),
        schedule(buckets, limits, patient),
        sparse(buckets.size()),
        untouched(buckets.places().size()),
        used_anywhere(buckets.places().size()),
        came_anywhere(buckets.places().size()) {}

  From from;               // caller: it tells nothing of what other steps use, and in what order
  bool early = false;      // the consumer takes buckets while backward runs
  bool abandoned = false;  // one that it was to take was

  BucketSchedule schedule;
  std::vector<std::optional<SparseSum>> sparse;  // by bucket
  Work trailer_work;

  // By gradient.
  std::vector<at::Tensor> untouched;  // what lay in grad() where this rank did not touch it, in case nobody did
  std::vector<bool> used_anywhere;
  std::vector<bool> came_anywhere;

  std::exception_ptr hook_error;  // what a communication hook has thrown while the step ended
};

}  // namespace shoal
