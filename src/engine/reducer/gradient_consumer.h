#pragma once
// Who uses means of gradients inside backward, bucket by bucket.

#include <torch/types.h>

#include <vector>

namespace shoal {

// The Reducer gives it each bucket once, in the same order on all ranks: the means lie in grad(), undefined where no
// rank used a parameter. Afterwards grad() is dropped and the bucket's memory goes. Called by the thread that runs
// backward, without gradients being recorded.
class GradientConsumer {
 public:
  virtual ~GradientConsumer() = default;
  // A step begins: whether its means must all be there before the first bucket is taken. Equal on all ranks; an
  // exception must be, too.
  virtual bool needs_all() const = 0;
  // They are, where that is so, or where no mean is known before the end of backward; before the first take().
  virtual void see_all(const std::vector<at::Tensor>& gradients) = 0;
  virtual void take(const std::vector<at::Tensor>& parameters) = 0;
  // All buckets have been taken; `abandoned`: those that had left before a rank gave the step up.
  virtual void end_step(bool abandoned) = 0;
};

}  // namespace shoal
