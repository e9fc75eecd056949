#pragma once
// Training loop; also the library's own usage example.

#include <csignal>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cli/train/checkpoints.h"
#include "cli/train/evaluate.h"
#include "cli/train/feed.h"
#include "cli/train/meeting.h"
#include "cli/train/step_bytes.h"
#include "cli/train/train_options.h"
#include "cli/train/train_result.h"
#include "models/model.h"
#include "shoal/elastic.h"
#include "shoal/schedules.h"
#include "shoal/training.h"
#include "shoal/world.h"

namespace shoal::cli {

// Set by SIGINT and SIGTERM; the trainer stops at the end of the step.
extern volatile std::sig_atomic_t interrupted;

class Trainer {
 public:
  // heeds_readers: training stops if nobody reads what it prints after an evaluation.
  Trainer(const TrainOptions& options, const World& world, std::shared_ptr<models::Model> model, Feed& feed,
          bool heeds_readers);

  // Trains to the end or until interrupted, starting where --resume says; saves checkpoints when due. Collective.
  TrainResult run();
  // See TrainingCore.
  std::shared_ptr<void> full_parameters() { return strategy_->full_parameters(); }
  bool has_whole_model() const { return strategy_->has_whole_model(); }
  // See Meeting. Elastic training repeats the work whenever a rank has ended.
  void together(const std::function<void(const Group& present)>& work);
  // Ranks at the start of the job.
  int started() const { return started_; }

 private:
  // What is due after a step, in this order.
  enum class Stage { evaluation, save, step };
  struct Loop;

  void train(Loop& loop, TrainResult& result);
  // A step with all that belongs to it; false: to be done again.
  bool train_step(Loop& loop, TrainResult& result);
  // The optimizer step alone. Nothing, if it has to be done again because a rank has ended.
  std::optional<double> step(int64_t number, TrainResult& result);
  void begin_epoch(int64_t number, int64_t first);
  int64_t total_steps() const;
  // Whether an evaluation follows these steps.
  bool evaluates(int64_t steps) const;
  // Whether this rank, or a rank that makes every step together with it, was interrupted before this step.
  bool is_interrupted(int64_t number) const;
  // Whether all ranks are always in the same step and end together.
  bool in_step() const {
    return options_.elastic || strategy_->strategy().synchronization != Synchronization::asynchronous;
  }
  bool leads() const { return strategy_->first_active_rank() == group_.rank(); }
  // Continues under the strategy that is due before this step; the line for the metrics, if there is one.
  std::optional<nlohmann::ordered_json> replan(int64_t number);
  // Takes the state for checkpoints from the present strategy.
  void take_state();

  // Between steps, and at the end (between_steps.cpp).
  Evaluation evaluated(const Group& present, TrainResult& result);
  void tell_evaluation(Loop& loop, const Evaluation& evaluation, TrainResult& result);
  // Whether all ranks stop because nobody reads what they print after an evaluation. Collective.
  bool is_unread();
  // Reports what could not be saved.
  void tolerate(const std::function<void()>& saving);
  void save_end(int64_t steps, TrainResult& result);

  // Elastic training (elastic_training.cpp). Ranks may notice an end in different stages; they go on with the first
  // one.
  void make_elastic();
  void train_elastic(Loop& loop, TrainResult& result);
  void run_stage(Loop& loop, TrainResult& result);
  Stage stage_after(const Loop& loop) const;
  bool agree_on_stage(Loop& loop);
  bool attempt(const std::function<void()>& work);
  void begin_epoch(Loop& loop);
  void follow(const ElasticChange& change);
  void tell_changes(Loop& loop, TrainResult& result);
  // In a process that comes to a running job: where the job is.
  void join(Loop& loop, TrainResult& result);
  void enter_world();
  void divide_anew(Loop& loop);
  std::optional<double> elastic_step(int64_t number, TrainResult& result);
  bool step_of_micros(int64_t number, TrainedStep& step, const std::function<void()>& update);
  // With keep_global_batch: each slice is one of the micro-batches.
  bool step_of_slices(int64_t number, TrainedStep& step, const std::function<void()>& update);
  void average_loss(int64_t number, TrainedStep& step) const;
  at::Tensor elastic_loss(int64_t number, const at::Tensor& data, const at::Tensor& target);
  int64_t batch_slices() const;
  void keep_batch();
  // Samples of a step over the ranks at the start.
  int64_t global_batch() const { return options_.batch * options_.accumulate * started_; }

  TrainOptions options_;  // under the present strategy
  TrainOptions all_options_;
  std::vector<std::pair<int64_t, std::string>> course_;
  World world_;
  Group group_;
  std::shared_ptr<models::Model> model_;
  Feed& feed_;
  bool heeds_readers_;
  Training<models::Model> strategy_;
  std::optional<Meeting> meeting_;
  std::vector<double> base_rates_;  // of the optimizer's param groups, without the schedule
  std::unique_ptr<LambdaLR> schedule_;
  Checkpoints checkpoints_{all_options_, feed_};
  std::unique_ptr<Elastic> elastic_;
  std::vector<ElasticChange> changes_;  // not told yet
  int64_t schedule_steps_ = 0;          // of the training, as the schedule counts them
  int started_ = 1;                     // ranks at the start of the job
  // For newcomers: next step, steps of an epoch, schedule_steps_, started_.
  at::Tensor position_ = at::zeros({4}, at::kLong);
  StepBytes bytes_;
  bool unread_ = false;  // nobody reads the output any more, which ends training
};

}  // namespace shoal::cli
