// Command `shoal flight`: analysis of the flight recorders of a job's ranks.

#include <fmt/format.h>

#include <memory>

#include "base/printable.h"
#include "cli/commands.h"
#include "cli/telemetry/lateness.h"
#include "cli/telemetry/run_files.h"
#include "cli/train/report.h"
#include "cli/writable.h"
#include "comm/telemetry/verdict.h"

namespace shoal::cli {
namespace {

using Json = nlohmann::ordered_json;

Json to_json(const std::vector<Flight>& flights, const std::vector<std::string>& sentences, size_t last) {
  Json ranks = Json::array();
  for (const auto& flight : flights) {
    Json records = Json::array();
    for (size_t i = flight.records.size() - std::min(last, flight.records.size()); i < flight.records.size(); ++i) {
      const auto& record = flight.records[i];
      records.push_back({{"operation", describe(record)},
                         {"group", record.group < 0 ? "" : printable(flight.groups[record.group].name)},
                         {"entered_ns", record.entered},
                         {"issued_ns", record.issued},
                         {"finished_ns", record.finished}});
    }
    ranks.push_back({{"rank", flight.rank},
                     {"size", flight.size},
                     {"pid", flight.process.pid},
                     {"host", printable(flight.host)},
                     {"state", state_in_words(flight)},
                     {"failure", flight.failure},
                     {"records", records}});
  }
  return {{"verdict", sentences}, {"ranks", ranks}};
}

void print_flight(const Flight& flight, size_t last) {
  fmt::print("rank {} of {}, pid {}: {}\n", flight.rank, flight.size, flight.process.pid, state_in_words(flight));
  const auto& records = flight.records;
  for (size_t i = records.size() - std::min(last, records.size()); i < records.size(); ++i) {
    const auto& record = records[i];
    const auto milliseconds = [&](int64_t time) {
      return time == 0 ? std::string("-") : fmt::format("{:+.3f}", 1e-6 * static_cast<double>(time - record.entered));
    };
    fmt::print("  {:>14.3f} ms  issued {:>9}  finished {:>9}  {}{}\n", 1e-6 * static_cast<double>(record.entered),
               milliseconds(record.issued), milliseconds(record.finished),
               record.group < 0 ? "" : printable(flight.groups[record.group].name) + " ", describe(record));
  }
}

}  // namespace

void add_flight_command(CLI::App& app, Action& chosen) {
  auto* command = app.add_subcommand("flight", "report which rank waits for which, from the ranks' flight recorders");
  command->footer(
      "shoal train or launch --flight-recorder FOLDER, or SHOAL_FLIGHT_RECORDER=FOLDER, makes each rank record its "
      "last collectives. The files can be read at any time. For several hosts, copy their folders to one host.");
  struct Options {
    std::vector<std::filesystem::path> places;
    size_t last = 0;
    std::string json;
  };
  const auto options = std::make_shared<Options>();
  command->add_option("places", options->places, "folders, or files rank-N.flight")->required();
  command->add_option("--last", options->last, "also list the last N operations of every rank")->capture_default_str();
  command->add_option("--json", options->json, "write the report as JSON to this file; - is standard output");
  command->callback([options, &chosen] {
    chosen = [options] {
      const auto flights = read_flights(options->places);
      for (const auto& place : options->places) {
        auto read = find_run(place).flights;
        if (std::filesystem::is_regular_file(place)) read.push_back(place);
        require_not_read("--json", options->json, read);
        require_no_rank_file("--json", options->json, place, ".flight");
      }
      const auto sentences = verdict(flights);
      if (!options->json.empty()) write_json(options->json, to_json(flights, sentences, options->last));
      if (options->json == "-") return 0;
      for (const auto& sentence : sentences) fmt::print("{}\n", sentence);
      fmt::print("\n");
      for (const auto& flight : flights) print_flight(flight, options->last);
      return 0;
    };
  });
}

}  // namespace shoal::cli
