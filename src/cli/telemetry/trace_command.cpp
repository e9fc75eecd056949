// Command `shoal trace`: work on the traces of `shoal train --trace`.

#include <memory>

#include "cli/commands.h"
#include "cli/telemetry/trace_merge.h"
#include "cli/train/report.h"
#include "cli/writable.h"
#include "shoal/error.h"

namespace shoal::cli {

void add_trace_command(CLI::App& app, Action& chosen) {
  auto* command = app.add_subcommand("trace", "process traces written by shoal train --trace FOLDER");
  command->require_subcommand(1);
  auto* merge =
      command->add_subcommand("merge", "merge the traces of all ranks into one, for chrome://tracing or Perfetto");
  merge->footer("Example: shoal trace merge traces -o job.json");
  struct Options {
    std::vector<std::filesystem::path> places;
    std::string target;
    std::string json;
  };
  const auto options = std::make_shared<Options>();
  merge->add_option("places", options->places, "folders, or files rank-N.json")->required();
  merge->add_option("-o,--output", options->target, "write the trace to this file; - is standard output")->required();
  merge->add_option("--json", options->json,
                    "write the numbers of ranks and events as JSON to this file; - is standard output");
  merge->callback([options, &chosen] {
    if (options->target == "-" && options->json == "-") {
      throw UsageError("-o - and --json -: give one of them a file");
    }
    require_two_files("--output", options->target, "--json", options->json);
    chosen = [options] {
      require_not_read("--json", options->json, trace_files(options->places));
      for (const auto& place : options->places) {
        require_no_rank_file("--output", options->target, place, ".json");
        require_no_rank_file("--json", options->json, place, ".json");
      }
      const auto merged = merge_traces(options->places, options->target);
      if (!options->json.empty()) {
        write_json(options->json, {{"output", options->target}, {"ranks", merged.ranks}, {"events", merged.events}});
      }
      return 0;
    };
  });
}

}  // namespace shoal::cli
