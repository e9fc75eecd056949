#pragma once
// Result of a training: losses, times, bytes and memory.

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cli/train/counters.h"
#include "cli/train/evaluate.h"
#include "planning/measured_step.h"
#include "shoal/telemetry.h"

namespace shoal::cli {

struct TrainedStep {
  MeasuredStep measured;
  int64_t samples = 0;      // of this rank; the last step of an epoch may have fewer than the others
  int64_t all_samples = 0;  // of all ranks
};

struct TrainResult {
  std::vector<double> loss;       // mean over this rank's micro-batches, per step; elastic: over those of all ranks
  std::vector<double> lr;         // of the first param group, per step
  std::vector<double> step_ms;    // of this rank
  std::vector<double> wait_ms;    // part of step_ms spent waiting for communication
  std::vector<double> update_ms;  // part of step_ms spent in the optimizer's step, without waits
  std::vector<int64_t> sent;      // bytes of this rank's collectives, per step
  std::vector<Counters> counted;  // of this rank, per step
  int64_t calls = 0;              // of this rank's collectives, in all steps
  double params_mib = 0;          // memory of this rank by kind, at the end of a step
  double grads_mib = 0;
  double state_mib = 0;
  int64_t wire_bytes = 0;                               // that this rank has received over TCP in the steps
  std::vector<Evaluation> eval;                         // per epoch
  std::vector<std::pair<std::string, double>> figures;  // see exchange_figures
  std::optional<LoggingData> logging;                   // of the wrapper, if there is one
  double seconds = 0;                                   // without evaluation and saving
  int64_t samples = 0;                                  // trained by this rank
  int64_t all_samples = 0;                              // of all ranks that were there
  int64_t missed = 0;                                   // steps of the job before this rank came
  bool stopped = false;                                 // after an interrupt, or because nobody reads the output
  bool unread = false;                                  // stopped because nobody reads the output
  std::vector<nlohmann::ordered_json> replans;          // as in the metrics
  std::vector<nlohmann::ordered_json> changes;          // of the ranks, as in the metrics
  std::string checkpoint;                               // saved at the end; empty: none
  std::string kept_latest;   // checkpoint of an earlier run that `latest` still names after an interrupt; empty: none
  bool done_before = false;  // the checkpoint that --resume latest found is that of the last step: nothing was trained

  // All but the loss and the rate.
  void add(const TrainedStep& step);
};

}  // namespace shoal::cli
