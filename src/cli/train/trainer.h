#pragma once
// Training loop; also the library's own usage example.

#include <csignal>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cli/train/counters.h"
#include "cli/train/evaluate.h"
#include "cli/train/feed.h"
#include "cli/train/meeting.h"
#include "cli/train/train_options.h"
#include "models/model.h"
#include "shoal/progress.h"
#include "shoal/schedules.h"
#include "shoal/training.h"
#include "shoal/world.h"

namespace shoal::cli {

// Set by SIGINT and SIGTERM; the trainer stops at the end of the step.
extern volatile std::sig_atomic_t interrupted;

struct TrainResult {
  std::vector<double> loss;       // of this rank: mean over micro-batches, per step
  std::vector<double> lr;         // of the first param group, per step
  std::vector<double> step_ms;    // of this rank
  std::vector<double> wait_ms;    // part of step_ms spent waiting for communication
  std::vector<double> update_ms;  // part of step_ms spent in the optimizer's step
  std::vector<int64_t> sent;      // bytes of this rank's collectives, per step
  std::vector<Counters> counted;  // of this rank, per step
  GroupStatistics communication;  // of the whole training
  double params_mib = 0;          // memory of this rank by kind, at the end of a step
  double grads_mib = 0;
  double state_mib = 0;
  int64_t wire_bytes = 0;                               // sum over all ranks, for TCP between ranks of this host
  std::vector<Evaluation> eval;                         // per epoch
  std::vector<std::pair<std::string, double>> figures;  // see exchange_figures
  std::optional<LoggingData> logging;                   // of the wrapper, if there is one
  double seconds = 0;                                   // without evaluation and saving
  int64_t samples = 0;                                  // of this rank
  bool stopped = false;                                 // after an interrupt
  std::vector<nlohmann::ordered_json> replans;          // as in the metrics
  std::string checkpoint;                               // saved at the end; empty: none
};

class Trainer {
 public:
  Trainer(const TrainOptions& options, const Group& group, std::shared_ptr<models::Model> model, Feed& feed);

  // Trains to the end or until interrupted, starting where --resume says; saves checkpoints when due. Collective.
  TrainResult run();
  // See TrainingCore.
  std::shared_ptr<void> full_parameters() { return strategy_->full_parameters(); }
  bool has_whole_model() const { return strategy_->has_whole_model(); }
  // See Meeting.
  void together(const std::function<void(const Group& present)>& work) { meeting_->together(work); }

 private:
  double step(int64_t number, TrainResult& result);
  nlohmann::ordered_json metrics_of(int64_t number, int64_t first, const TrainResult& result) const;
  // Whether this rank, or a rank that makes every step together with it, was interrupted before this step.
  bool is_interrupted(int64_t number) const;
  // Whether all ranks are always in the same step and end together.
  bool in_step() const { return strategy_->strategy().pace != Pace::own; }
  bool leads() const { return strategy_->leader() == group_.rank(); }
  int64_t total_steps() const;
  // Returns the first step.
  int64_t resume();
  // Takes the state for checkpoints from the present strategy.
  void make_state();
  // Continues under the strategy that is due before this step; the line for the metrics, if there is one.
  std::optional<nlohmann::ordered_json> replan(int64_t number);
  void begin_epoch(int64_t number, int64_t first);
  // Saves after `steps` steps. in_background: training goes on meanwhile.
  void save(int64_t steps, bool in_background);
  bool is_due(int64_t steps) const;
  // Reports what could not be saved.
  void tolerate(const std::function<void()>& saving);
  void save_end(int64_t steps, TrainResult& result);
  void evaluate_model(int64_t epoch, ProgressBar& progress, TrainResult& result);

  TrainOptions options_;  // under the present strategy
  TrainOptions all_options_;
  std::vector<std::pair<int64_t, std::string>> course_;
  Group group_;
  std::shared_ptr<models::Model> model_;
  Feed& feed_;
  Training<models::Model> strategy_;
  std::optional<Meeting> meeting_;
  std::unique_ptr<LambdaLR> schedule_;
  std::optional<TrainingState> training_;
};

}  // namespace shoal::cli
