// `shoal report`: curves of runs as one HTML page.

#include <fmt/format.h>

#include <cstdio>
#include <memory>

#include "base/print_to_stderr.h"
#include "cli/commands.h"
#include "cli/telemetry/report_page.h"
#include "cli/telemetry/run_files.h"
#include "cli/train/report.h"
#include "cli/writable.h"
#include "shoal/error.h"

namespace shoal::cli {

void add_report_command(CLI::App& app, Action& chosen) {
  auto* command = app.add_subcommand("report", "write an HTML page with the curves of one or several runs");
  command->footer(
      "Reads what shoal train --metrics FILE writes, and other programs' files of one JSON object per line with a "
      "step. The page needs no network and no script. Example: shoal report runs/a runs/b -o report.html");
  struct Options {
    std::vector<std::string> places;
    std::string output = "report.html";
    std::string json;
  };
  const auto options = std::make_shared<Options>();
  command->add_option("places", options->places, "folders of runs, or metrics files; several are drawn together")
      ->required();
  command->add_option("-o,--output", options->output, "write the page to this file; - is standard output")
      ->capture_default_str();
  command->add_option("--json", options->json, "write the figures as JSON to this file; - is standard output");
  command->callback([options, &chosen] {
    if (options->output == "-" && options->json == "-") throw UsageError("-o - and --json -: give one of them a file");
    require_two_files("--output", options->output, "--json", options->json);
    for (const auto& place : options->places) {
      const auto read = find_run(place).all();
      require_not_read("--output", options->output, read);
      require_not_read("--json", options->json, read);
    }
    require_writable_file("--output", options->output);
    require_writable_file("--json", options->json);
    chosen = [options] {
      std::vector<RunReport> runs;
      for (const auto& place : options->places) {
        for (auto& run : read_runs(place)) {
          if (run.damaged.count > 0) print_to_stderr("shoal: {}\n", run.damaged.in_words());
          runs.push_back(std::move(run));
        }
      }
      const auto page = report_page(runs);
      if (!options->json.empty()) write_json(options->json, to_json(runs));
      if (options->output == "-") {
        fmt::print("{}", page);
        return 0;
      }
      write_text(options->output, page);
      if (options->json != "-") fmt::print("{}\n", options->output);
      return 0;
    };
  });
}

}  // namespace shoal::cli
