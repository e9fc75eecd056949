#pragma once
// Log of a training while it runs: a progress bar, lines between, and the metrics file.

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "cli/train/evaluate.h"
#include "cli/train/metrics.h"
#include "cli/train/train_result.h"
#include "shoal/progress.h"
#include "shoal/training.h"

namespace shoal::cli {

// Every rank has one, since any may have to report in place of one that has ended; only the rank that reports writes.
class TrainLog {
 public:
  TrainLog(Metrics metrics, int64_t steps, double samples_per_step, bool reports);

  bool reports() const { return reports_; }
  // Takes over the reports from a rank that has ended, or hands them over to one that has joined.
  void report(bool reports);

  // After a step. sampled: the training has measured the phases of this step.
  void step(int64_t number, const TrainResult& result, const TrainingCore& training, bool sampled);
  // Of the result's last evaluation. number: of the step before it. Not collective.
  void evaluation(int64_t number, const TrainResult& result);
  // A change of the strategy or of the ranks: a line for people, and one for the metrics.
  void change(const std::string& text, const nlohmann::ordered_json& metrics);
  // Prints a line on standard error, if this rank reports.
  void say(const std::string& text) const;
  // Makes room for lines that others print.
  void clear_progress() { progress_.clear(); }
  // At the end: what is missing of the metrics.
  void tell_fault() const;

 private:
  bool reports_;
  Metrics metrics_;
  ProgressBar progress_;
  std::optional<double> smooth_loss_;
};

// The line that people read of the result's last evaluation.
std::string evaluation_text(int64_t epoch, const TrainResult& result);

}  // namespace shoal::cli
