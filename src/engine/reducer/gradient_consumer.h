#pragma once
// Consumer of gradients: uses the means inside backward, bucket by bucket.

#include <torch/types.h>

#include <optional>
#include <vector>

namespace shoal {

// The Reducer passes each bucket once, in the same order on all ranks, with the means in grad(), undefined where no
// rank used the parameter. Afterwards it resets grad() and frees the bucket. Called by the thread that runs backward,
// without grad mode.
class GradientConsumer {
 public:
  virtual ~GradientConsumer() = default;
  // Called when a step begins. True if all means must be known before the first take(). Ranks must return the same or
  // throw alike.
  virtual bool needs_all() const = 0;
  // Called before the first take() with all means, if needs_all() or if no mean is known before backward ends.
  virtual void see_all(const std::vector<at::Tensor>& gradients) = 0;
  virtual void take(const std::vector<at::Tensor>& parameters) = 0;
  // Called after the last take(). abandoned: a rank gave the step up, and only buckets issued before that were taken.
  virtual void end_step(bool abandoned) = 0;

  // For checkpoints: the norm of the last step's gradients, equal on all ranks, if the next step may depend on it.
  virtual std::optional<double> last_norm() const { return std::nullopt; }
  // Begins as if the last step had had this norm; none: as before the first step.
  virtual void resume_from(std::optional<double> /*norm*/) {}
};

}  // namespace shoal
