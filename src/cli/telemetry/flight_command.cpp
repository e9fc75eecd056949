// Command `shoal flight`: analysis of the flight recorders of a job's ranks.

#include <fmt/format.h>

#include <memory>

#include "cli/commands.h"
#include "comm/telemetry/verdict.h"

namespace shoal::cli {
namespace {

std::string state_in_words(const Flight& flight) {
  if (flight.failed != 0) return "failed";
  if (flight.left != 0) return "left in order";
  if (!flight.state) return "on another host";
  switch (*flight.state) {
    case ProcessState::running:
      return "running";
    case ProcessState::stopped:
      return "stopped";
    default:
      return "gone";
  }
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
               record.group < 0 ? "" : flight.groups[record.group].name + " ", describe(record));
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
  };
  const auto options = std::make_shared<Options>();
  command->add_option("places", options->places, "folders, or files rank-N.flight")->required();
  command->add_option("--last", options->last, "also list the last N operations of every rank")->capture_default_str();
  command->callback([options, &chosen] {
    chosen = [options] {
      const auto flights = read_flights(options->places);
      for (const auto& sentence : verdict(flights)) fmt::print("{}\n", sentence);
      fmt::print("\n");
      for (const auto& flight : flights) print_flight(flight, options->last);
      return 0;
    };
  });
}

}  // namespace shoal::cli
