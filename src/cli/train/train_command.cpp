// Command `shoal train`: starts its ranks, or is one of them.

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <csignal>
#include <ctime>
#include <filesystem>

#include "base/end_process.h"
#include "base/print_to_stderr.h"
#include "checkpoint/folder.h"
#include "checkpoint/format/safetensors.h"
#include "checkpoint/loading/reader.h"
#include "cli/commands.h"
#include "cli/exit_code.h"
#include "cli/launch/ranks.h"
#include "cli/telemetry/trace.h"
#include "cli/train/device.h"
#include "cli/train/memory.h"
#include "cli/train/outputs.h"
#include "cli/train/report.h"
#include "cli/train/same_options.h"
#include "cli/train/threads.h"
#include "cli/writable.h"
#include "comm/membership/join_board.h"
#include "comm/rendezvous/launch_environment.h"
#include "comm/shm/host_memory.h"
#include "launch/limits.h"
#include "models/registry.h"
#include "shoal/error.h"
#include "shoal/telemetry.h"

namespace shoal::cli {
namespace {

constexpr size_t last_spans = 20'000;  // a second's writing

// Follows the words about the last checkpoint of --save when an elastic job is lost.
std::string how_it_goes_on(const std::string& save) {
  try {
    return has_checkpoint(save) ? "; the same command with --resume latest goes on from it" : "";
  } catch (const CheckpointError&) {
    return "";
  }
}

// Loads libraries and starts thread pools, so that their memory is not attributed to the model.
void load_libraries(const TrainOptions& options) {
  torch::nn::Linear toy(8, 8);
  options.precision().convert(*toy);
  auto input = at::zeros({4, 8}, toy->weight.options().requires_grad(false));
  toy->forward(input).sum().backward();
}

// The first signal lets the step end. A second Ctrl-C does not wait; within a second it is the same one, which a
// launcher has passed on, too.
void stop(int signal) {
  static volatile std::sig_atomic_t first = 0;  // the second in which it came
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  const auto second = static_cast<std::sig_atomic_t>(now.tv_sec);
  if (interrupted != 0 && signal == SIGINT && second - first > 1) {
    std::signal(SIGINT, SIG_DFL);
    raise(SIGINT);
  }
  if (interrupted == 0) first = second;
  interrupted = 1;
}

void stop_at_the_end_of_the_step() {
  struct sigaction action {};
  action.sa_handler = stop;
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  struct sigaction hangup {};
  const bool nohup = sigaction(SIGHUP, nullptr, &hangup) == 0 && hangup.sa_handler == SIG_IGN;
  if (!nohup) sigaction(SIGHUP, &action, nullptr);
}

// Writes to a pipe that nobody reads are errors, and end no rank before it has saved. False: they were ignored already.
bool ignore_sigpipe() {
  return std::signal(SIGPIPE, SIG_IGN) != SIG_IGN;
}

// Saves the model alone, for other programs; rank 0 has all of it.
std::string save_model(const TrainOptions& options, const models::Model& model) {
  std::error_code error;
  std::filesystem::create_directories(options.save, error);
  auto path = options.save + "/model.safetensors";
  save_safetensors(path, named_state(model), {{"format", "pt"}, {"model", options.model}, {"size", options.size}});
  return path;
}

std::string summary(const nlohmann::ordered_json& report, const TrainResult& result, const TrainOptions& options,
                    const World& world, const std::string& model) {
  const auto& timing = report["timing"];
  auto text =
      fmt::format("\n{} {} on {} rank(s), {}, {}: {} steps in {:.1f} s\n", options.model, options.size, world.size(),
                  options.strategy, world.group().transport(), result.loss.size(), result.seconds);
  if (!result.eval.empty()) {
    const auto& last = result.eval.back();
    if (options.model == "gpt") {
      text += fmt::format("  test perplexity     {:.3f} ({} bytes)\n", std::exp(last.loss), last.count);
    } else {
      text += fmt::format("  test accuracy       {:.2f} % ({} images)\n", 100 * last.accuracy, last.count);
    }
  }
  text += fmt::format("  last loss           {:.4f}\n", report["loss"].back().get<double>());
  const auto rate = timing["samples_per_second"].get<double>();
  text += rate < 10 ? fmt::format("  samples per second  {:.3g}\n", rate)
                    : fmt::format("  samples per second  {:.0f}\n", rate);
  text += fmt::format("  step, median        {:.3f} ms\n", timing["median_ms"].get<double>());
  const auto& communication = report["communication"];
  text +=
      fmt::format("  communication       {:.0f} bytes in {:.1f} collectives per step and rank",
                  communication["bytes_per_step"].get<double>(), communication["collectives_per_step"].get<double>());
  if (const auto bytes = communication["wire_bytes_per_step"].get<double>(); bytes >= 1) {
    text += fmt::format("; {:.0f} over TCP, all ranks", bytes);
  }
  text += fmt::format("\n  peak memory         {:.0f} MiB per rank\n",
                      fmt::join(report["memory"]["rss_peak_mib"].get<std::vector<double>>(), ", "));
  if (!result.checkpoint.empty()) text += fmt::format("  checkpoint          {}\n", result.checkpoint);
  if (!model.empty()) text += fmt::format("  model               {}\n", model);
  if (options.logging_data && result.logging) text += fmt::format("\n{}", to_table(*result.logging));
  return text;
}

// Of a rank that is interrupted or fails: what it did last may show why. To write all that days have left would take
// longer than a launcher waits.
void keep_trace(const TrainOptions& options, const WorldOptions& world_options, int rank, Clock::duration clock) {
  if (options.trace.empty()) return;
  try {
    write_trace(options.trace, *world_options.timeline, rank, clock, last_spans);
  } catch (const Error& error) {
    print_to_stderr("shoal: --trace: {}\n", error.what());
  }
}

// datasets: those that the launcher has read; nullptr: this rank reads them.
int train_rank(const TrainOptions& options, const Datasets* datasets = nullptr) {
  WorldOptions world_options;
  world_options.transport = options.transport;
  world_options.check_agreement = options.check_agreement;
  world_options.timeout_seconds = options.timeout_seconds;
  if (!options.flight_recorder.empty()) world_options.flight_recorder = options.flight_recorder;
  if (!options.trace.empty()) world_options.timeline = std::make_shared<Timeline>();
  const auto world = init(world_options);
  if (world.joining() && !options.elastic) {  // before it opens any file as rank 0
    throw UsageError("shoal train cannot join a running job (SHOAL_JOIN) without --elastic MIN, which its ranks have");
  }
  set_threads(options, world);
  stop_at_the_end_of_the_step();
  const bool heeds_readers = ignore_sigpipe();
  const auto device = use_device(options.device, world.local_rank());
  const auto read = datasets != nullptr ? *datasets : read_datasets(options);
  const auto feed = on_device(make_feed(options, world.rank(), world.size(), read), device);
  if (world.joining()) {  // before the others wait for it
    require_writable_folder("--trace", options.trace);
  } else {
    require_same_options(options, *feed, world.group());
    check_outputs(options, world.group());
  }
  const auto clock = options.trace.empty() ? Clock::duration(0) : clock_offset(world.group());
  load_libraries(options);
  MemoryUse memory{.before = resident_mib()};
  const auto init = options.init == "reference" ? models::Init::reference : models::Init::torch;
  const auto model = models::make_model(options.model, options.size, init, options.seed, options.data_dtype());
  options.precision().convert(*model);
  model->to(device);
  reset_peak();

  int code = interrupted_code;
  const auto leave_interrupted = [&](bool says, const std::string& what, const std::string& path) -> int {
    keep_trace(options, world_options, world.rank(), clock);
    if (says) print_to_stderr("interrupted{}\n", path.empty() ? "" : fmt::format("; {} in {}", what, path));
    end_process(code);  // peers may have stopped one step earlier or later
  };
  try {
    Trainer trainer(options, world, model, *feed, heeds_readers);
    const auto result = trainer.run();
    if (result.done_before) {
      // The run that ended there may not have come to write the model.
      const auto whole = options.save.empty() ? nullptr : trainer.full_parameters();
      if (world.rank() == 0 && !options.save.empty()) save_model(options, *model);
      if (world.rank() == 0 && !options.json.empty()) {
        print_to_stderr("--json {}: no report, as nothing was trained\n", options.json);
      }
      return 0;
    }
    memory.peak = peak_resident_mib();
    memory.pss = proportional_mib();
    std::string file;  // the file of the model alone
    bool leads = world.rank() == 0;
    nlohmann::ordered_json report;
    const bool meets = !result.stopped || !options.save.empty();
    if (meets) {
      trainer.together([&](const Group& present) {
        nlohmann::ordered_json params_per_rank;
        if (options.chosen().synchronization == Synchronization::asynchronous)
          params_per_rank = digests_of_ranks(present, *model);
        const auto whole = trainer.full_parameters();
        leads = present.rank() == 0;
        if (leads && !options.save.empty() && result.kept_latest.empty()) file = save_model(options, *model);
        if (!result.stopped) {
          report = make_report(options, world, present, *model, result, memory, params_per_rank);
          report["config"]["world"] = trainer.started();
        }
      });
    }
    // One rank that fails is enough, unless a job is well if any rank ends well.
    const bool any_suffices = options.chosen().synchronization == Synchronization::asynchronous || options.elastic;
    if (result.unread) code = leads || any_suffices ? failed : 0;
    if (result.stopped && !result.kept_latest.empty()) {
      return leave_interrupted(
          leads, "checkpoint",
          fmt::format(
              "{0}; {1}/latest and {1}/model.safetensors are still those of the earlier run ({2}): --resume {0} "
              "goes on from this one",
              result.checkpoint, options.save, result.kept_latest));
    }
    if (result.stopped && !result.checkpoint.empty()) return leave_interrupted(leads, "checkpoint", result.checkpoint);
    if (result.stopped) return leave_interrupted(leads, "model", file);
    // Before files, whose path may be gone; that nobody reads it is told at the end.
    if (leads && options.json != "-") write_to_stdout(summary(report, result, options, world, file));
    if (leads && !options.json.empty()) write_json(options.json, report);
    if (!options.trace.empty()) {
      write_trace(options.trace, *world_options.timeline, world.rank(), clock);
    }
    bool unread = !is_printed();
    if (any_suffices) {
      trainer.together([&](const Group& present) {
        const Label label{-1, -1, "whether the summary is printed"};
        unread = present.all_reduce(unread ? 1.0 : 0.0, ReduceOp::max, label) != 0;
      });
    }
    return unread ? failed : 0;
  } catch (const JobLost& lost) {
    keep_trace(options, world_options, world.rank(), clock);
    if (options.save.empty()) throw;
    throw JobLost(lost.what() + how_it_goes_on(options.save));
  } catch (const Error& error) {
    // After an interrupt, peers may have ended first or be doing other things. All other errors are reported.
    const bool of_peers =
        dynamic_cast<const CommError*>(&error) != nullptr || dynamic_cast<const DisagreeError*>(&error) != nullptr;
    if (interrupted != 0 && of_peers) return leave_interrupted(world.rank() == 0, "", "");
    keep_trace(options, world_options, world.rank(), clock);
    throw;
  }
}

// Number of ranks. UsageError if the command line contradicts the launcher.
int ranks_of(const TrainOptions& options, const Placement& placement) {
  const bool started = placement.source != "alone";
  const bool joins = process_environment()(newcomer_variable).has_value();
  if (started && !joins && options.ranks && *options.ranks != placement.size) {
    throw UsageError(fmt::format("--ranks {} contradicts the world of {} that {} describe", *options.ranks,
                                 placement.size, placement.source));
  }
  const int ranks = started                                                            ? placement.size
                    : options.chosen().synchronization == Synchronization::single_rank ? 1
                                                                                       : options.ranks.value_or(2);
  if (options.transport == "mpi" && !started && ranks > 1) {
    throw UsageError(fmt::format("--transport mpi: start the ranks with mpirun -n {} shoal train ...", ranks));
  }
  return ranks;
}

// Reports faults that every rank would find on its own, and those that would show only after training.
void check_start(const TrainOptions& options, const Placement& placement, int ranks) {
  if (options.elastic.value_or(0) > ranks) {
    throw UsageError(fmt::format("--elastic {}: give at most {}, the ranks that start", *options.elastic, ranks));
  }
  options.check_strategy(ranks, placement.source == "alone" ? std::optional(1) : std::nullopt);
  data_files(options);  // refuses those that are not there
  require_open_files(ranks);
  if (ranks > 1 && (options.transport == "auto" || options.transport == "host")) require_file_size(shm::arena_bytes);
  require_writable_folder("--flight-recorder", options.flight_recorder);
  if (placement.source == "alone") check_outputs(options);  // ranks of other launchers check them together
}

// A model alone, as --save and other programs write it, is refused once, and in the words of the command line.
void check_resume(const TrainOptions& options) {
  const bool joins = process_environment()(newcomer_variable).has_value();
  if (options.resume.empty() || options.partial || options.resume_if_any || joins) return;
  if (!CheckpointReader(options.resume, /*verify=*/false).index().strategy.empty()) return;
  throw UsageError(
      fmt::format("--resume {}: it holds a model without the state of a training; give --partial to begin with it at "
                  "step 0",
                  options.resume));
}

// Ranks that are forks share the memory of what was read before. OpenMP's threads do not survive a fork: none may begin
// here.
Datasets read_before_forks(const TrainOptions& options) {
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  auto read = read_datasets(options);
  at::set_num_threads(threads);
  return read;
}

int train(const TrainOptions& options, const Placement& placement, int ranks, const std::vector<std::string>& line) {
  check_resume(options);
  if (placement.rank == 0 && !options.trace.empty()) remove_traces(options.trace);
  if (placement.source != "alone" || (ranks == 1 && options.elastic_most == 0)) return train_rank(options);
  LaunchOptions how{.ranks = ranks,
                    .threads = threads_per_rank(options, ranks),
                    .prefix_output = false,
                    .flight_recorder = options.flight_recorder,
                    .keep_going = options.chosen().synchronization == Synchronization::asynchronous && !options.elastic,
                    .min_ranks = options.elastic.value_or(0),
                    .most_ranks = options.elastic_most,
                    .max_restarts = options.max_restarts,
                    .when_lost = [&options] {
                      return options.save.empty()
                                 ? std::string()
                                 : last_checkpoint_in_words(options.save) + how_it_goes_on(options.save);
                    }};
  if (options.elastic_most == 0) {
    const auto read = read_before_forks(options);
    return launch_ranks(how, line, [&] { return train_rank(options, &read); });
  }
  how.command = line;  // newcomers do not start as forks
  return launch(how);
}

}  // namespace

void add_train_command(CLI::App& app, const std::vector<std::string>& line, Action& chosen) {
  auto* command = app.add_subcommand("train", "train a built-in model on built-in data or your own");
  const auto options = std::make_shared<TrainOptions>();
  add_train_options(*command, *options);
  command->callback([options, &line, &chosen] {
    options->complete();
    if (options->flight_recorder.empty()) {
      options->flight_recorder = process_environment()("SHOAL_FLIGHT_RECORDER").value_or("");
    }
    const auto placement = find_place(options->ranks);
    const int ranks = ranks_of(*options, placement);
    check_start(*options, placement, ranks);
    chosen = [options, placement, ranks, &line] { return train(*options, placement, ranks, line); };
  });
}

}  // namespace shoal::cli
