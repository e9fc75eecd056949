// The options of `shoal train` on the command line, in the order in which --help lists them.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <string>

#include "cli/launch/elastic_range.h"
#include "cli/strategies/optimizers.h"
#include "cli/strategies/schedules.h"
#include "cli/strategies/strategy_options.h"
#include "cli/train/require.h"
#include "cli/train/train_options.h"
#include "comm/transport/transport.h"

namespace shoal::cli {
namespace {

void add_model_options(CLI::App& command, TrainOptions& options) {
  command.add_option("--model", options.model, "model: cnn, mlp, gpt")->capture_default_str();
  command.add_option("--size", options.size, "model size: tiny, small; gpt also large, gpt2")->capture_default_str();
  command
      .add_option("--data", options.data,
                  "training data: fashion-mnist[:FOLDER with the four IDX files], reference (computed by a hash), "
                  "text:FILE (bytes, for gpt)")
      ->capture_default_str();
  command.add_option("--init", options.init,
                     "initial parameters: torch, reference (computed by a hash; default with --data reference)");
}

void add_choice_of_strategy(CLI::App& command, TrainOptions& options) {
  command.add_option("--strategy", options.strategy, fmt::format("{}", fmt::join(strategy_names(), ", ")))
      ->capture_default_str();
  command.footer(list_of_strategies());
  command.add_option(
      "--replan", options.replan,
      "STEP:STRATEGY[,STEP:STRATEGY...]: continue under another strategy after so many steps, from memory");
  command.add_option("--ranks", options.ranks, "number of processes to start (default: 2, or as set by the launcher)");
}

void add_elastic_options(CLI::App& command, TrainOptions& options) {
  command
      .add_option_function<std::string>(
          "--elastic",
          [&options](const std::string& text) {
            const auto range = elastic_range(text);
            options.elastic = range.least;
            options.elastic_most = range.most;
          },
          fmt::format(
              "the other ranks go on, in memory, when one ends, while so many are left; with MAX, ranks may join, "
              "too: in place of failed ones (--max-restarts), and one more for each SIGUSR2; for {}",
              fmt::join(elastic_strategies(), ", ")))
      ->type_name("MIN[:MAX]");
  command.add_flag(
      "--keep-global-batch", options.keep_global_batch,
      "with --elastic, the ranks that are left compute the micro-batches of those that have ended, so that "
      "losses are those of all ranks; one that joins takes some of them");
  command.add_option("--straggler-seconds", options.straggler_seconds,
                     "with --elastic, kill a rank that the others have waited for twice as long, so that they go on");
  command.add_option(
      "--silent-host-seconds", options.silent_host_seconds,
      "with --elastic on several hosts, take a host of which nothing is heard for so long for lost (default: 10)");
  command.add_option("--max-restarts", options.max_restarts,
                     "with --elastic MIN:MAX, start a rank in place of one that has failed, so often in all");
}

void add_process_options(CLI::App& command, TrainOptions& options) {
  command.add_option("--threads", options.threads,
                     "compute threads per rank (default: OMP_NUM_THREADS, else cores / ranks on this host)");
  command
      .add_option("--device", options.device,
                  "cpu or cuda: each rank takes the next GPU of its host, in turn where there are fewer")
      ->capture_default_str();
  command.add_option("--transport", options.transport, fmt::format("{}", fmt::join(transport_names(), ", ")))
      ->capture_default_str();
  command.add_flag("--check-agreement", options.check_agreement,
                   "compare the arguments of every collective over ranks first, also over gloo and mpi");
  command
      .add_option("--timeout", options.timeout_seconds, "timeout of an operation in seconds, while all ranks are alive")
      ->capture_default_str();
}

void add_optimizer_options(CLI::App& command, TrainOptions& options) {
  command
      .add_option("--optimizer", options.optimizer,
                  fmt::format("{} (adamw, accum_adamw: with weight decay 0.1; muon: for matrices of hidden layers, "
                              "adamw for the rest)",
                              fmt::join(optimizer_names(), ", ")))
      ->capture_default_str();
  command.add_option("--lr", options.lr,
                     "learning rate (default: sgd 0.05; sgd_momentum, adagrad, adafactor 0.01; others 1e-3)");
  command.add_option("--accum-iter", options.accum_iter,
                     "accum_adam, accum_adamw: steps per update of the moments (default: 4)");
  command
      .add_option("--schedule", options.schedule,
                  "learning-rate schedule: constant; linear_warmup, then constant; cosine, down to 0; one_cycle, up "
                  "and down; step, down by a factor")
      ->capture_default_str();
  command.add_option("--warmup-steps", options.warmup_steps,
                     "warm-up steps of linear_warmup, cosine (default: 0) and one_cycle (default: 30 %)");
  command.add_option("--decay-every", options.decay_every, "--schedule step: steps between two reductions of the rate");
  command.add_option("--decay-factor", options.decay_factor,
                     "--schedule step: factor of each reduction (default: 0.1)");
}

void add_batch_options(CLI::App& command, TrainOptions& options) {
  command.add_option_function<int64_t>(
      "--batch",
      [&options](int64_t samples) {
        require_at_least<int64_t>("--batch", samples, 1);
        require_at_most<int64_t>("--batch", samples, 1'000'000);
        options.batch = samples;
      },
      "samples per micro-batch and rank (default: 4 for reference data, 64 otherwise)");
  command.add_option("--accumulate", options.accumulate, "micro-batches per step")->capture_default_str();
  command.add_option("--steps", options.steps, "optimizer steps (default for reference data: 10)");
  command.add_option("--epochs", options.epochs,
                     "passes over the training data (default: 1); micro-batches at the end of one that do not fill a "
                     "step are left out");
  command
      .add_option(
          "--dtype", options.dtype,
          "float32, float64, bf16_mixed, fp16_mixed; bf16: bfloat16 parameters, for strategies that keep float32 "
          "copies of them; bf16_pure: for others, where small updates are lost")
      ->capture_default_str();
  command.add_option("--clip", options.clip, "clip gradients to this total norm; 0: no clipping")
      ->capture_default_str();
  command.add_option("--seed", options.seed, "seed of parameters, data and shuffling")->capture_default_str();
}

void add_checkpoint_options(CLI::App& command, TrainOptions& options) {
  command.add_flag("--eval", options.eval, "evaluate on the test data after every epoch");
  command.add_option("--save", options.save,
                     "folder for checkpoints (step-N) and the model alone (model.safetensors), written at the end and "
                     "on an interrupt");
  command.add_option("--save-every", options.save_every, "also save a checkpoint every N steps, in the background");
  command.add_option("--keep-last", options.keep_last, "keep the newest N checkpoints (default: all)");
  command.add_option(
      "--resume", options.resume,
      "resume from a checkpoint or the latest in a folder; latest: the latest in --save DIR, or step 0 if it has none "
      "yet");
  command.add_flag("--partial", options.partial,
                   "--resume loads only the parameters and buffers that the checkpoint has, and training begins at "
                   "step 0: for fine-tuning");
}

void add_output_options(CLI::App& command, TrainOptions& options) {
  command.add_option("--trace", options.trace, "folder for Chrome traces, rank-N.json; see shoal trace merge");
  command.add_option("--flight-recorder", options.flight_recorder,
                     "folder for the flight recorders, which keep each rank's last collectives; see shoal flight and "
                     "shoal top (default: SHOAL_FLIGHT_RECORDER)");
  command.add_option("--metrics", options.metrics,
                     "write a line of JSON to this file after every step and evaluation, behind those of the run that "
                     "--resume goes on from; loss and times are those of rank 0; see shoal top and shoal report");
  command.add_flag("--logging-data", options.logging_data,
                   "print the logging data of rank 0's wrapper at the end (also part of --json)");
  command.add_option("--json", options.json, "write the report as JSON to this file; - is standard output");
}

}  // namespace

void add_train_options(CLI::App& command, TrainOptions& options) {
  add_model_options(command, options);
  add_choice_of_strategy(command, options);
  add_elastic_options(command, options);
  add_process_options(command, options);
  add_optimizer_options(command, options);
  add_batch_options(command, options);
  add_checkpoint_options(command, options);
  add_output_options(command, options);
  add_strategy_options(command, options.strategy_options);
}

}  // namespace shoal::cli
