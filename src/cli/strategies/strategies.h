#pragma once
// The strategies that `shoal train` knows, behind one small interface.

#include <torch/optim/optimizer.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/train/train_options.h"
#include "models/model.h"
#include "shoal/checkpoint.h"
#include "shoal/group.h"
#include "shoal/telemetry.h"

namespace shoal::cli {

// How one rank trains.
class Strategy {
 public:
  Strategy(const TrainOptions& options, std::shared_ptr<models::Model> model);
  virtual ~Strategy() = default;
  virtual at::Tensor forward(const at::Tensor& input) = 0;
  // Backward of a micro-batch's loss; gradients are final after the last one of a step.
  virtual void backward(const at::Tensor& loss, bool last) = 0;
  virtual void step() = 0;
  virtual void zero_grad() = 0;

  // While it lives, every rank can read all parameters. Collective, at both ends.
  virtual std::shared_ptr<void> whole_parameters() { return nullptr; }

  // Whether this rank can read all parameters without the others.
  virtual bool has_whole_model() const { return true; }

  // What this rank holds of the parameters, and, after a backward, of the gradients.
  virtual std::vector<at::Tensor> parameters() const { return model_->parameters(); }
  virtual std::vector<at::Tensor> gradients() const;
  // What a schedule changes.
  virtual torch::optim::Optimizer& optimizer() = 0;
  // The optimizers that hold this rank's state.
  virtual std::vector<const torch::optim::Optimizer*> local_optimizers() const = 0;

  // For checkpoints; none for ranks that never communicate. `in_step`: whether ranks are always in the same step, and
  // end together.
  virtual std::optional<TrainingState> training_state(const Group& group) = 0;
  virtual bool in_step() const { return true; }
  // The ranks that make every step together; none: all.
  virtual std::optional<Group> bound() const { return std::nullopt; }
  // The ranks that are still there; none: all. Collective over them.
  virtual std::optional<Group> present() const { return std::nullopt; }
  // The rank that prints and writes what is said once: the first that is still there, as far as this one knows.
  virtual int leader() const { return 0; }
  // For the progress line, and for the report. figures(): collective.
  virtual std::string note() const { return ""; }
  virtual std::vector<std::pair<std::string, double>> figures() { return {}; }
  // Of the wrapper, if there is one.
  virtual std::optional<LoggingData> logging_data() const { return std::nullopt; }

 protected:
  at::Tensor scaled(const at::Tensor& loss) const;
  // With the scaler, if there is one.
  std::optional<TrainingState> scaled(TrainingState training);

  const TrainOptions& options_;
  std::shared_ptr<models::Model> model_;
  std::optional<GradScaler> scaler_;  // where precision asks for one
};

std::vector<std::string> strategy_names();
// total_steps: of the training, for schedules. Collective over the group, except for the strategies that do not
// communicate.
std::unique_ptr<Strategy> make_strategy(const TrainOptions& options, const std::shared_ptr<models::Model>& model,
                                        const Group& group, int64_t total_steps);

}  // namespace shoal::cli
