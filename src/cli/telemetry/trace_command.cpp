// Command `shoal trace`: work on the traces of `shoal train --trace`.

#include <memory>

#include "cli/commands.h"
#include "cli/telemetry/trace_merge.h"

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
  };
  const auto options = std::make_shared<Options>();
  merge->add_option("places", options->places, "folders, or files rank-N.json")->required();
  merge->add_option("-o,--output", options->target, "write the trace to this file; - is standard output")->required();
  merge->callback([options, &chosen] {
    chosen = [options] {
      merge_traces(options->places, options->target);
      return 0;
    };
  });
}

}  // namespace shoal::cli
