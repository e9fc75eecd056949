#include "cli/train/train_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <set>

#include "base/limits.h"
#include "cli/launch/elastic_range.h"
#include "cli/strategies/optimizers.h"
#include "cli/strategies/schedules.h"
#include "cli/strategies/strategy_options.h"
#include "cli/strategies/units.h"
#include "cli/train/device.h"
#include "comm/transport/transport.h"
#include "models/registry.h"
#include "shoal/error.h"

namespace shoal::cli {
namespace {

void require_one_of(const char* option, const std::string& value, const std::vector<std::string>& choices) {
  if (std::find(choices.begin(), choices.end(), value) != choices.end()) return;
  throw UsageError(fmt::format("{} {}: not in this version; available: {}", option, value, fmt::join(choices, ", ")));
}

template <class T>
void require_at_least(const char* option, T value, T least) {
  if (value < least) throw UsageError(fmt::format("{} {}: give at least {}", option, value, least));
}

template <class T>
void require_at_most(const char* option, T value, T most) {
  if (value > most) throw UsageError(fmt::format("{} {}: give at most {}", option, value, most));
}

void complete_saving(TrainOptions& options) {
  require_at_least<int64_t>("--save-every", options.save_every, 0);
  require_at_least<int64_t>("--keep-last", options.keep_last, 0);
  if (options.save_every > 0 && options.save.empty()) throw UsageError("--save-every needs --save DIR");
  if (options.keep_last > 0 && options.save.empty()) throw UsageError("--keep-last needs --save DIR");
  if (options.resume == "latest") {
    if (options.save.empty()) throw UsageError("--resume latest needs --save DIR: it is the latest checkpoint there");
    options.resume = options.save;
    options.resume_if_any = !options.partial;
  }
  if (options.partial && options.resume.empty()) throw UsageError("--partial needs --resume PATH");
  if (options.chosen().pace != Pace::alone) return;
  for (const auto& [option, given] :
       {std::pair("--save-every", options.save_every > 0), std::pair("--keep-last", options.keep_last > 0),
        std::pair("--resume", !options.resume.empty())}) {
    if (!given) continue;
    throw UsageError(
        fmt::format("{}: --strategy {} has no checkpoints, because its ranks do not communicate; --save DIR alone "
                    "saves a model at the end",
                    option, options.strategy));
  }
}

// Every option must belong to one of the strategies; each is checked on its own.
void check_course(const TrainOptions& options) {
  const auto course = options.course();
  if (options.steps && course.back().first >= *options.steps) {
    throw UsageError(fmt::format("--replan {}: training ends after step {}", options.replan, *options.steps));
  }
  if (course.size() == 1) return in_words_of_the_command_line([&] { options.values(); });
  for (const auto& option : options.strategy_options) {
    const bool known = std::any_of(course.begin(), course.end(),
                                   [&](const auto& entry) { return find_strategy(entry.second).has(option.first); });
    if (!known) in_words_of_the_command_line([&] { option_values(options.chosen(), {option}); });
  }
  for (const auto& [step, name] : course) {
    const auto under = options.under(name);
    in_words_of_the_command_line([&] { under.values(); });
    if (find_strategy(name).pace == Pace::common) continue;
    throw UsageError(
        fmt::format("--replan: ranks of {} do not make every step together; it is for strategies whose "
                    "ranks do",
                    name));
  }
}

void check_dtype(const TrainOptions& options) {
  require_one_of("--dtype", options.dtype, precision_names());
  for (const auto& [step, name] : options.course()) {
    try {
      precision_of(name, options.dtype);
    } catch (const UsageError& error) {
      const bool several = options.course().size() > 1;
      throw UsageError(
          fmt::format("--dtype {}{}", error.what(), several ? "; with --replan, all can take bf16_mixed" : ""));
    }
  }
}

// What goes on without ranks that have ended; the rest is refused before the ranks start.
void check_elastic(const TrainOptions& options) {
  if (options.max_restarts != 0 && options.elastic_most == 0) {
    throw UsageError("--max-restarts: give --elastic MIN:MAX, so that ranks may join");
  }
  if (options.straggler_seconds) {
    if (!options.elastic) throw UsageError("--straggler-seconds: give --elastic, so that the others can go on");
    if (!(*options.straggler_seconds > 0 && 2 * *options.straggler_seconds < options.timeout_seconds)) {
      throw UsageError(fmt::format("--straggler-seconds {}: give more than 0 and less than half of --timeout {}",
                                   *options.straggler_seconds, options.timeout_seconds));
    }
  }
  if (options.keep_global_batch) {
    if (!options.elastic) throw UsageError("--keep-global-batch: give --elastic, so that ranks may end");
    if (options.reference_data()) throw UsageError("--keep-global-batch: reference data has no epochs to share out");
    const std::set<std::string> alone{"local_sgd", "slowmo", "diloco"};
    if (alone.contains(options.strategy)) {
      throw UsageError(
          fmt::format("--keep-global-batch: ranks of --strategy {} have no gradients in common", options.strategy));
    }
    const auto micro_batches = int64_t{options.accumulate} * options.ranks.value_or(1);
    const bool grows = options.ranks && options.elastic_most > micro_batches;
    if (grows && options.batch * micro_batches % options.elastic_most != 0) {
      throw UsageError(fmt::format(
          "--keep-global-batch: {} samples of a step cannot be divided among {} ranks, to which --elastic lets "
          "the job grow: give another --batch or --accumulate",
          options.batch * micro_batches, options.elastic_most));
    }
  }
  if (options.silent_host_seconds) {
    if (!options.elastic) throw UsageError("--silent-host-seconds: give --elastic, so that the other hosts can go on");
    if (!(*options.silent_host_seconds >= 0.5 && *options.silent_host_seconds < 1e6)) {
      throw UsageError(
          fmt::format("--silent-host-seconds {}: give 0.5 or more, below 1e6", *options.silent_host_seconds));
    }
  }
  if (!options.elastic) return;
  require_at_least("--elastic", *options.elastic, 1);
  if (options.ranks && *options.elastic > *options.ranks) {
    throw UsageError(
        fmt::format("--elastic {}: give at most --ranks {}, the ranks that start", *options.elastic, *options.ranks));
  }
  if (!options.chosen().elastic) {
    throw UsageError(
        fmt::format("--elastic: --strategy {} does not go on without a rank that has ended; take one of {}",
                    options.strategy, fmt::join(elastic_strategies(), ", ")));
  }
  const auto refuse = [](const std::string& what, const std::string& why) {
    throw UsageError(fmt::format("--elastic with {}: {}", what, why));
  };
  if (options.device != "cpu")
    refuse("--device " + options.device, "only what lies in the CPU's memory outlives a rank");
  if (!options.replan.empty()) refuse("--replan", "a rank that ends in the change of strategy would end the training");
  if (options.strategy == "ddp" && options.values().given("optimizer_in_backward")) {
    refuse("--optimizer-in-backward", "a step whose updates have begun cannot be undone; leave one of them out");
  }
  const bool oss = options.strategy == "zero1" || options.strategy == "zero2";
  if (oss && options.precision().scaler) {
    refuse(fmt::format("--strategy {} --dtype {}", options.strategy, options.dtype),
           "a loss scaler communicates in the update; take ddp, megatron or fsdp, or --dtype bf16_mixed");
  }
  const bool sockets = options.transport == "tcp" || options.transport == "gloo";
  const bool memory = options.transport == "auto" || options.transport == "host";
  const std::vector<std::string> over_sockets{"ddp", "zero1", "zero2", "megatron", "fsdp", "fsdp_grad_op"};
  const bool may = std::find(over_sockets.begin(), over_sockets.end(), options.strategy) != over_sockets.end();
  if (memory || (sockets && may)) return;
  refuse(fmt::format("--strategy {} --transport {}", options.strategy, options.transport),
         "take auto or host, or with ddp, zero1, zero2, megatron, fsdp and fsdp_grad_op also tcp or gloo");
}

}  // namespace

std::vector<std::pair<int64_t, std::string>> TrainOptions::course() const {
  std::vector<std::pair<int64_t, std::string>> list{{0, strategy}};
  const auto refuse = [&] {
    throw UsageError(
        fmt::format("--replan {}: give STEP:STRATEGY[,STEP:STRATEGY...] with ascending steps from 1", replan));
  };
  for (size_t begin = 0; !replan.empty() && begin <= replan.size();) {
    const auto end = std::min(replan.find(',', begin), replan.size());
    const auto colon = replan.find(':', begin);
    if (colon == std::string::npos || colon > end) refuse();
    int64_t step = 0;
    const auto [rest, error] = std::from_chars(replan.data() + begin, replan.data() + colon, step);
    if (error != std::errc() || rest != replan.data() + colon || step <= list.back().first) refuse();
    list.emplace_back(step, replan.substr(colon + 1, end - colon - 1));
    require_one_of("--replan", list.back().second, strategy_names());
    begin = end + 1;
  }
  return list;
}

TrainOptions TrainOptions::under(const std::string& name) const {
  auto options = *this;
  options.strategy = name;
  return options;
}

void TrainOptions::complete() {
  require_one_of("--strategy", strategy, strategy_names());
  require_one_of("--transport", transport, transport_names());
  require_one_of("--optimizer", optimizer, optimizer_names());
  require_one_of("--schedule", schedule, schedule_names());
  check_dtype(*this);
  if (ranks) {
    require_at_least("--ranks", *ranks, 1);
    require_at_most("--ranks", *ranks, max_ranks);
  }
  if (chosen().pace == Pace::single && ranks && *ranks != 1) {
    throw UsageError(fmt::format("--strategy {} trains in one process: --ranks {} is not possible", strategy, *ranks));
  }
  require_at_least("--threads", threads, 0);
  require_at_most("--threads", threads, max_threads);
  require_at_least("--accumulate", accumulate, 1);
  require_at_least("--timeout", timeout_seconds, 1);
  if (steps) require_at_least<int64_t>("--steps", *steps, 1);
  if (epochs) require_at_least("--epochs", *epochs, 1);
  if (steps && epochs) throw UsageError("--steps and --epochs exclude each other: give one of them");
  if (lr && !(*lr > 0 && std::isfinite(*lr))) throw UsageError(fmt::format("--lr {}: give a number above 0", *lr));
  complete_saving(*this);
  const bool known = data == "fashion-mnist" || data.rfind("fashion-mnist:", 0) == 0 || reference_data() || text_data();
  if (!known)
    throw UsageError(fmt::format("--data {}: fashion-mnist, fashion-mnist:FOLDER, reference or text:FILE", data));
  models::require_model(model, size);
  if (text_data() && model != "gpt") throw UsageError(fmt::format("--data text: requires --model gpt, not {}", model));
  if (!text_data() && !reference_data() && model == "gpt") {
    throw UsageError("--model gpt reads bytes: give --data text:FILE or reference");
  }
  if (reference_data() && epochs) throw UsageError("--epochs: reference data has no end; give --steps");
  if (reference_data() && eval) throw UsageError("--eval: reference data has no test set");
  if (init.empty()) init = reference_data() ? "reference" : "torch";
  require_one_of("--init", init, {"torch", "reference"});
  if (reference_data() && !steps) steps = 10;
  if (!reference_data() && !steps && !epochs) epochs = 1;
  check_optimizer(*this);
  check_schedule(*this);
  if (batch == 0) batch = reference_data() ? 4 : 64;
  if (!(clip >= 0)) throw UsageError(fmt::format("--clip {}: give a norm, or 0 for none", clip));
  check_logging_data(*this);
  check_course(*this);
  check_device(device);
  check_elastic(*this);
}

void TrainOptions::check_strategy(int on_ranks, std::optional<int> hosts) const {
  for (const auto& [step, name] : course()) {
    const auto under = this->under(name);
    const auto& check = under.chosen().check;
    if (!check) continue;
    in_words_of_the_command_line([&] { check(under.values(), under.training_options(), on_ranks, hosts); });
  }
}

std::string TrainOptions::compress() const {
  return chosen().has("compress") ? values().text("compress") : "none";
}

TrainingOptions TrainOptions::training_options() const {
  TrainingOptions training{.options = strategy_options,
                           .clip_grad = clip,
                           .precision = precision(),
                           .units = unit_policy(model),
                           .seed = seed};
  if (!replan.empty()) {
    std::erase_if(training.options, [this](const auto& entry) { return !chosen().has(entry.first); });
  }
  const bool wide = chosen().main_copies && dtype.ends_with("_mixed") && chosen().has("grad_reduce_in_fp32");
  if (wide) training.options.try_emplace("grad_reduce_in_fp32", "true");
  return training;
}

void add_train_options(CLI::App& command, TrainOptions& options) {
  command.add_option("--model", options.model, "model: cnn, mlp, gpt")->capture_default_str();
  command.add_option("--size", options.size, "model size: tiny, small; gpt also large, gpt2")->capture_default_str();
  command
      .add_option("--data", options.data,
                  "training data: fashion-mnist[:FOLDER with the four IDX files], reference (computed by a hash), "
                  "text:FILE (bytes, for gpt)")
      ->capture_default_str();
  command.add_option("--init", options.init,
                     "initial parameters: torch, reference (computed by a hash; default with --data reference)");
  command.add_option("--strategy", options.strategy, fmt::format("{}", fmt::join(strategy_names(), ", ")))
      ->capture_default_str();
  command.footer(list_of_strategies());
  command.add_option(
      "--replan", options.replan,
      "STEP:STRATEGY[,STEP:STRATEGY...]: continue under another strategy after so many steps, from memory");
  command.add_option("--ranks", options.ranks, "number of processes to start (default: 2, or as set by the launcher)");
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
  command.add_flag("--eval", options.eval, "evaluate on the test data after every epoch");
  command.add_option("--save", options.save,
                     "folder for checkpoints (step-N) and the model alone (model.safetensors), written at the end and "
                     "on an interrupt");
  command.add_option("--save-every", options.save_every, "also save a checkpoint every N steps, in the background");
  command.add_option("--keep-last", options.keep_last, "keep the newest N checkpoints (default: all)");
  command.add_option(
      "--resume", options.resume,
      "resume from a checkpoint or the latest in a folder; latest: the latest in --save DIR, or step 0 if "
      "it has none yet");
  command.add_flag("--partial", options.partial,
                   "--resume loads only the parameters and buffers that the checkpoint has, and training begins at "
                   "step 0: for fine-tuning");
  command.add_option("--trace", options.trace, "folder for Chrome traces, rank-N.json; see shoal trace merge");
  command.add_option("--flight-recorder", options.flight_recorder,
                     "folder for the flight recorders, which keep each rank's last collectives; see shoal flight and "
                     "shoal top (default: "
                     "SHOAL_FLIGHT_RECORDER)");
  command.add_option("--metrics", options.metrics,
                     "write a line of JSON to this file after every step and evaluation, behind those of the run that "
                     "--resume goes on from; loss and times are those of rank 0; see shoal top and shoal report");
  command.add_flag("--logging-data", options.logging_data,
                   "print the logging data of rank 0's wrapper at the end (also part of --json)");
  command.add_option("--json", options.json, "write the report as JSON to this file; - is standard output");
  add_strategy_options(command, options.strategy_options);
}

}  // namespace shoal::cli
