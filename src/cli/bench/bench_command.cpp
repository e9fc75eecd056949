// Command `shoal bench`: starts its ranks, or is one of them.

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/version.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <set>
#include <string>

#include "base/limits.h"
#include "base/print_to_stderr.h"
#include "cli/bench/collectives.h"
#include "cli/bench/html.h"
#include "cli/bench/table.h"
#include "cli/bench/training.h"
#include "cli/commands.h"
#include "cli/exit_code.h"
#include "cli/launch/ranks.h"
#include "cli/machine.h"
#include "cli/train/report.h"
#include "cli/writable.h"
#include "comm/rendezvous/launch_environment.h"
#include "shoal/error.h"

namespace shoal::cli {
namespace {

struct BenchOptions {
  CollectiveOptions collectives;
  TrainingBenchOptions training;
  bool train = false;  // training instead of collectives
  std::optional<int> ranks;
  int threads = 1;
  std::optional<int> rounds;  // default: depends on the kind of bench
  std::string json;
  std::string html;
};

int finish(const BenchOptions& options, const char* kind, const nlohmann::ordered_json& figures,
           const std::string& table) {
  nlohmann::ordered_json report{{"machine", machine()},
                                {"versions", {{"shoal", SHOAL_VERSION}, {"libtorch", TORCH_VERSION}}},
                                {"load_1min", load_average()},
                                {kind, figures}};
  if (!options.json.empty()) write_json(options.json, report);
  if (!options.html.empty()) write_text(options.html, html_report(report));
  if (options.json != "-") fmt::print("{}", table);
  return 0;
}

int bench_rank(const BenchOptions& options, int rank) {
  at::set_num_threads(options.threads);
  const auto figures = bench_collectives(options.collectives);
  return rank == 0 ? finish(options, "collectives", figures, collectives_table(figures)) : 0;
}

constexpr int default_ranks = 2;

// Checks that the options fit the way in which the bench was started.
void validate_start(const BenchOptions& options, const Placement& placement) {
  const auto& transports = options.collectives.transports;
  const bool over_mpi = std::find(transports.begin(), transports.end(), "mpi") != transports.end();
  const bool started = placement.source != "alone";
  if (options.train && over_mpi) throw UsageError("--transports mpi measures collectives; it does not go with --train");
  if (options.train && started) throw UsageError("bench --train starts its own ranks: run it without a launcher");
  if (over_mpi && !started) {
    throw UsageError(fmt::format("--transports mpi: start the ranks with mpirun -n {} shoal bench ...",
                                 options.ranks.value_or(default_ranks)));
  }
  if (started && options.ranks && *options.ranks != placement.size) {
    throw UsageError(fmt::format("--ranks {} contradicts the world of {} that {} describe", *options.ranks,
                                 placement.size, placement.source));
  }
}

// Options of training without --train, those of collectives with it, and those of peers without any.
void refuse_what_is_ignored(const CLI::App& command, bool train) {
  const std::set<std::string> of_collectives{"--ops", "--sizes", "--dtypes", "--buffers"};
  for (const auto* option : command.get_options()) {
    const auto name = option->get_name();
    const bool of_training = name != "--train" && option->get_description().rfind("--train:", 0) == 0;
    if (option->count() == 0 || (train ? of_collectives.count(name) == 0 : !of_training)) continue;
    throw UsageError(train ? name + " is for collectives: leave it out with --train"
                           : name + " is for training steps: give --train, too");
  }
  if (command.get_option("--peer-python")->count() > 0) return;
  for (const auto* name : {"--peer-script", "--peers", "--peer-impl"}) {
    if (command.get_option(name)->count() == 0) continue;
    throw UsageError(fmt::format("{} is for Python peers: give --peer-python, too", name));
  }
}

int bench(const BenchOptions& options, const Placement& placement, const std::vector<std::string>& line) {
  if (options.train) {
    const auto bench = bench_training(options.training, line[0]);
    if (!bench) {
      print_to_stderr("interrupted\n");
      return interrupted_code;
    }
    return finish(options, "train", json_of(*bench, options.training), bench->figures.table());
  }
  if (placement.source != "alone") return bench_rank(options, placement.rank);
  return launch_ranks({.ranks = options.ranks.value_or(default_ranks),
                       .threads = options.threads,
                       .prefix_output = false,
                       .flight_recorder = process_environment()("SHOAL_FLIGHT_RECORDER").value_or("")},
                      line, [&options] { return bench_rank(options, find_placement({}, process_environment()).rank); });
}

void add_collectives_options(CLI::App& command, BenchOptions& options) {
  auto& collectives = options.collectives;
  command
      .add_option("--ops", collectives.ops,
                  "all_reduce, reduce, reduce_scatter, all_gather, broadcast, all_to_all, send_recv, barrier")
      ->delimiter(',')
      ->capture_default_str();
  command.add_option("--sizes", collectives.sizes, "bytes of the full tensor: 4, 64K, 16M, 1G")
      ->delimiter(',')
      ->capture_default_str();
  command.add_option("--dtypes", collectives.dtypes, "float64, float32, float16, bfloat16, int64, int32")
      ->delimiter(',')
      ->capture_default_str();
  command
      .add_option("--transports", collectives.transports,
                  "host, tcp, gloo; in builds with MPI also mpi: mpirun -n 2 shoal bench --transports mpi,host,gloo")
      ->delimiter(',')
      ->capture_default_str();
  command
      .add_option("--buffers", collectives.buffers,
                  "memory of the tensors over host: shared (Group::allocate), once (Group::allocate_host_shared, "
                  "all_gather only), staged (any other memory, which is copied); other transports always copy "
                  "(default: all)")
      ->delimiter(',');
}

void add_training_options(CLI::App& command, BenchOptions& options) {
  auto& training = options.training;
  command.add_flag("--train", options.train, "measure whole training steps instead of collectives");
  command
      .add_option(
          "--strategies", training.strategies,
          fmt::format("--train: strategies to measure: {}; decentralized:TOPOLOGY, and the peer decent_dp:TOPOLOGY",
                      fmt::join(measured_strategies(), ", ")))
      ->delimiter(',')
      ->capture_default_str();
  command.add_option("--model", training.model, "--train: model: mlp, cnn, gpt")->capture_default_str();
  command.add_option("--size", training.size, "--train: model size: tiny, small; gpt also large, gpt2")
      ->capture_default_str();
  command.add_option("--optimizer", training.optimizer, "--train: as in shoal train")->capture_default_str();
  command.add_option("--batch", training.batch, "--train: samples per rank")->capture_default_str();
  command.add_option("--accumulate", training.accumulate, "--train: micro-batches per step")->capture_default_str();
  command.add_option("--steps", training.steps, "--train: steps per run, three of them warm-up")->capture_default_str();
  command.add_option("--peer-python", training.peer_python, "--train: Python interpreter with torch, for the peers");
  command.add_option("--peer-script", training.peer_script, "--train: path of peers.py");
  command.add_option("--peers", training.peers, "--train: peers to measure")->delimiter(',')->capture_default_str();
  command
      .add_option("--peer-impl", training.peer_impl,
                  "--train: optimizer implementation of the peers: default, foreach, fused")
      ->capture_default_str();
  command.add_flag(
      "--exact-memory", training.exact_memory,
      "--train: make malloc return freed blocks at once, also in the peers: exact memory figures, slower steps");
}

// Completes the options. Returns where the ranks are.
Placement check_bench_options(BenchOptions& options, const CLI::App& command) {
  refuse_what_is_ignored(command, options.train);
  if (options.threads < 1 || options.threads > max_threads) {
    throw UsageError(fmt::format("--threads {}: give 1 to {}", options.threads, max_threads));
  }
  if (options.ranks.value_or(default_ranks) < 2) throw UsageError("--ranks must be at least 2");
  if (options.rounds.value_or(1) < 1) {
    throw UsageError(fmt::format("--rounds {}: give at least 1", *options.rounds));
  }
  if (options.rounds) options.collectives.rounds = options.training.rounds = *options.rounds;
  options.training.ranks = options.ranks.value_or(default_ranks);
  options.training.threads = options.threads;
  options.training.transports = options.collectives.transports;
  options.collectives.validate();
  if (options.train) options.training.validate();
  const auto placement = find_place(options.ranks);
  validate_start(options, placement);
  require_not_standard_output("--html", options.html);
  require_two_files("--json", options.json, "--html", options.html);
  if (placement.rank == 0) {
    require_writable_file("--json", options.json);
    require_writable_file("--html", options.html);
  }
  return placement;
}

}  // namespace

void add_bench_command(CLI::App& app, const std::vector<std::string>& line, Action& chosen) {
  auto* command = app.add_subcommand(
      "bench", "measure collectives or training steps, with peer implementations in the same rounds");
  const auto options = std::make_shared<BenchOptions>();
  add_collectives_options(*command, *options);
  command->add_option("--rounds", options->rounds,
                      "number of rounds; each measures every case once (default: 20, with --train 3)");
  add_training_options(*command, *options);
  command->add_option("--ranks", options->ranks,
                      "number of processes to start (default: 2, or as set by the launcher)");
  command->add_option("--threads", options->threads, "compute threads per rank")->capture_default_str();
  command->add_option("--json", options->json, "write the report as JSON to this file; - is standard output");
  command->add_option("--html", options->html, "write the report as an HTML page with plots to this file");
  command->callback([options, command, &line, &chosen] {
    const auto placement = check_bench_options(*options, *command);
    chosen = [options, placement, &line] { return bench(*options, placement, line); };
  });
}

}  // namespace shoal::cli
