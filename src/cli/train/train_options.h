#pragma once
// Options of `shoal train`.

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "shoal/training.h"

namespace shoal::cli {

struct TrainOptions {
  std::string model = "cnn";
  std::string size = "tiny";
  std::string data = "fashion-mnist";
  std::string init;  // default: reference with --data reference, torch otherwise
  std::string strategy = "ddp";
  std::optional<int> ranks;  // default: the environment's, else 2
  int threads = 0;           // per rank; 0: cores / ranks
  std::string device = "cpu";
  std::string transport = "auto";
  std::string optimizer = "adamw";
  std::optional<double> lr;
  std::optional<int64_t> accum_iter;  // steps
  std::string schedule = "constant";
  std::optional<int64_t> warmup_steps;
  std::optional<int64_t> decay_every;  // steps
  std::optional<double> decay_factor;
  int64_t batch = 0;  // samples per micro-batch and rank; 0: 4 for reference data, 64 otherwise
  int accumulate = 1;
  std::optional<int64_t> steps;
  std::optional<int> epochs;
  std::string dtype = "float32";
  uint64_t seed = 1;
  bool eval = false;
  std::string save;
  int64_t save_every = 0;
  int64_t keep_last = 0;       // number of checkpoints kept in `save`; 0: all
  std::string resume;          // path, or "latest"
  bool resume_if_any = false;  // with "latest": start at step 0 if there is no checkpoint yet
  bool partial = false;        // load only the part of the model that the checkpoint has
  std::string trace;           // folder
  std::string json;
  double clip = 0;  // maximum norm of the gradients; 0: no clipping
  int timeout_seconds = 300;
  bool check_agreement = false;
  StrategyOptions strategy_options;  // those given on the command line
  std::optional<int> elastic;        // ranks that must be left for the training to go on; none: all
  int elastic_most = 0;              // ranks to which it may grow; 0: none can join
  bool keep_global_batch = false;    // see ElasticOptions; the batch is that of the ranks at the start
  std::optional<double> silent_host_seconds;
  std::optional<double> straggler_seconds;  // see ElasticOptions; none: ranks are waited for
  int max_restarts = 0;                     // ranks that are started in place of failed ones, with elastic_most
  std::string replan;                       // "STEP:STRATEGY,..."
  std::string flight_recorder;              // folder
  std::string metrics;                      // file
  bool logging_data = false;                // print it at the end

  bool reference_data() const { return data == "reference"; }
  bool text_data() const { return data.rfind("text:", 0) == 0; }
  // Part of --data after the colon.
  std::optional<std::string> data_path() const {
    const auto colon = data.find(':');
    return colon == std::string::npos ? std::nullopt : std::optional(data.substr(colon + 1));
  }
  const Strategy& chosen() const { return find_strategy(strategy); }
  // Precision of the strategy: one with float32 main copies holds 16-bit parameters where others compute in 16 bits.
  Precision precision() const { return precision_of(strategy, dtype); }
  // The communication hook's text.
  std::string compress() const;
  TrainingOptions training_options() const;
  // The strategies that training goes through, with the number of steps before each one; the first is `strategy`.
  // UsageError for a --replan that does not have this form.
  std::vector<std::pair<int64_t, std::string>> course() const;
  // These options under another strategy of the course, which takes those of the strategies' options that it has.
  TrainOptions under(const std::string& name) const;
  // Values of the strategy's options.
  OptionValues values() const { return option_values(chosen(), training_options().options); }
  at::ScalarType data_dtype() const { return dtype == "float64" ? at::kDouble : at::kFloat; }

  // Sets defaults that depend on other options. UsageError names the option and the valid values.
  void complete();
  // UsageError if the strategy cannot train on this number of ranks, or of hosts, if known.
  void check_strategy(int ranks, std::optional<int> hosts) const;
};

// UsageError for --elastic, and options that need it, with what would not go on without a rank.
void check_elastic(const TrainOptions& options);

void add_train_options(CLI::App& command, TrainOptions& options);

}  // namespace shoal::cli
