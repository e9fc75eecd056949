// `shoal bench`: starts its ranks, or is one of them.

#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <memory>

#include "cli/bench/collectives.h"
#include "cli/bench/samples.h"
#include "cli/bench/table.h"
#include "cli/commands.h"
#include "cli/report.h"
#include "comm/launch_environment.h"
#include "launch/launcher.h"
#include "shoal/base/error.h"

namespace shoal::cli {
namespace {

struct BenchOptions {
  CollectiveOptions collectives;
  int ranks = 2;
  int threads = 1;
  std::string json;
};

int bench_rank(const BenchOptions& options, int rank) {
  at::set_num_threads(options.threads);
  const auto figures = bench_collectives(options.collectives);
  if (rank != 0) return 0;
  nlohmann::ordered_json report{{"machine", machine()},
                                {"versions", {{"shoal", SHOAL_VERSION}, {"libtorch", TORCH_VERSION}}},
                                {"load_1min", load_average()},
                                {"collectives", figures}};
  if (!options.json.empty()) write_json(options.json, report);
  if (options.json != "-") fmt::print("{}", collectives_table(figures));
  return 0;
}

int bench(const BenchOptions& options, const std::vector<std::string>& line) {
  const auto placement = find_placement({}, process_environment());
  if (placement.source != "alone") return bench_rank(options, placement.rank);
  return launch({.ranks = options.ranks, .command = line, .threads = options.threads, .prefix_output = false});
}

}  // namespace

void add_bench_command(CLI::App& app, const std::vector<std::string>& line, Action& chosen) {
  auto* command = app.add_subcommand("bench", "measure collectives and training, peers in the same rounds");
  const auto options = std::make_shared<BenchOptions>();
  auto& collectives = options->collectives;
  command
      ->add_option("--ops", collectives.ops,
                   "all_reduce, reduce, reduce_scatter, all_gather, broadcast, all_to_all, send_recv, barrier")
      ->delimiter(',')
      ->capture_default_str();
  command->add_option("--sizes", collectives.sizes, "of the full tensor: 4, 64K, 16M, 1G")
      ->delimiter(',')
      ->capture_default_str();
  command->add_option("--dtypes", collectives.dtypes, "float64, float32, float16, bfloat16, int64, int32")
      ->delimiter(',')
      ->capture_default_str();
  command->add_option("--transports", collectives.transports, "host, gloo")->delimiter(',')->capture_default_str();
  command
      ->add_option("--buffers", collectives.buffers, "shared (Group::allocate), staged (any other memory); host only")
      ->delimiter(',')
      ->capture_default_str();
  command->add_option("--rounds", collectives.rounds, "each measures every case once")->capture_default_str();
  command->add_option("--ranks", options->ranks, "processes to start")->capture_default_str();
  command->add_option("--threads", options->threads, "compute threads per rank")->capture_default_str();
  command->add_option("--json", options->json, "file for the report, - for standard output");
  command->callback([options, &line, &chosen] {
    options->collectives.validate();
    if (options->ranks < 2) throw UsageError("--ranks must be at least 2");
    chosen = [options, &line] { return bench(*options, line); };
  });
}

}  // namespace shoal::cli
