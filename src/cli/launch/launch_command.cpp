#include <fmt/format.h>

#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>

#include "base/environment.h"
#include "cli/commands.h"
#include "cli/exit_code.h"
#include "cli/launch/elastic_range.h"
#include "cli/train/report.h"
#include "cli/writable.h"
#include "comm/rendezvous/socket.h"
#include "launch/launcher.h"
#include "shoal/error.h"
#include "shoal/world.h"

namespace shoal::cli {
namespace {

void read_elastic(const std::string& text, LaunchOptions& options) {
  if (text.empty()) return;
  const auto range = elastic_range(text);
  options.min_ranks = range.least;
  options.most_ranks = range.most;
}

// The name of another host, or of this one among several, may become known a little later.
void require_known_address(const LaunchOptions& options) {
  const std::chrono::seconds limit(options.nodes > 1 || options.join ? WorldOptions().rendezvous_timeout_seconds : 0);
  try {
    resolve_within(limit, options.address, options.port);
  } catch (const std::runtime_error& error) {
    throw UsageError(
        fmt::format("--address {}: {}; give a name or number of node 0's host", options.address, error.what()));
  }
}

// Whether the option's value is the next word.
bool takes_next_word(const CLI::App& command, const std::string& word) {
  const auto* option = command.get_option_no_throw(word);
  return option != nullptr && option->get_items_expected_max() > 0;
}

}  // namespace

// CLI11 would look for options among them, and cut words in brackets at commas.
std::vector<std::string> take_program(const CLI::App& app, std::vector<std::string>& line) {
  if (line.size() < 2 || line[1] != "launch") return {};
  const auto& command = *app.get_subcommand("launch");
  auto word = line.begin() + 2;
  while (word != line.end() && *word != "--" && word->starts_with('-')) {
    const bool pair = takes_next_word(command, *word) && word + 1 != line.end();
    if (pair && *(word + 1) == "--") throw UsageError(fmt::format("launch: {} has no value before --", *word));
    word += pair ? 2 : 1;
  }
  const auto first = word != line.end() && *word == "--" ? word + 1 : word;
  std::vector<std::string> program(first, line.end());
  if (program.empty()) return program;
  line.erase(word, line.end());
  line.insert(line.end(), {"--", "PROGRAM"});
  return program;
}

void add_launch_command(CLI::App& app, const std::vector<std::string>& program, Action& chosen) {
  auto* command = app.add_subcommand("launch", "start N ranks of a program on this host, or on each of several");
  command->footer("The ranks get torchrun's environment variables. Example: shoal launch -n 4 -- ./train --lr 0.1");
  const auto options = std::make_shared<LaunchOptions>();
  command->add_option("-n,--ranks", options->ranks, "number of processes to start")->capture_default_str();
  command->add_option("--threads", options->threads,
                      "OMP_NUM_THREADS of each rank (default: as in the environment, else cores / ranks)");
  command->add_option("--address", options->address, "address of the interface on which the ranks connect")
      ->capture_default_str();
  command->add_option("--port", options->port, "port on which the ranks connect (default: a free one)");
  command
      ->add_option(
          "--nnodes", options->nodes,
          "number of hosts, on each of which this command is given with the same -n, --address (of node 0), --port "
          "and SHOAL_SECRET")
      ->capture_default_str();
  command->add_option("--node-rank", options->node, "number of this host, from 0")->capture_default_str();
  command
      ->add_option("--grace", options->grace_seconds,
                   "seconds between the first failure and the end of the other ranks")
      ->capture_default_str();
  command
      ->add_option(
          "--stop-grace", options->stop_seconds,
          "seconds for the ranks to end after the first Ctrl-C, SIGTERM or SIGHUP; a further Ctrl-C or SIGTERM, more "
          "than a second later, kills them")
      ->capture_default_str();
  command->add_option(
      "--flight-recorder", options->flight_recorder,
      "folder for the flight recorders, which keep each rank's last collectives; see shoal flight (default: "
      "SHOAL_FLIGHT_RECORDER)");
  command->add_flag("--keep-going", options->keep_going,
                    "keep the other ranks running when a rank fails (decentralized training continues without it)");
  const auto elastic = std::make_shared<std::string>();
  command
      ->add_option(
          "--elastic", *elastic,
          "keep the other ranks running while at least MIN have not failed (a program with shoal::Elastic goes "
          "on without them); with MAX, ranks may also join: in place of failed ones (--max-restarts), and one "
          "more for each SIGUSR2 to this launcher")
      ->type_name("MIN[:MAX]");
  command->add_option("--max-restarts", options->max_restarts,
                      "with --elastic MIN:MAX, start a rank in place of one that has failed, so often in all");
  command->add_flag(
      "--join", options->join,
      "this host comes to a job of several, which was started with --elastic MIN:MAX: its N ranks join; give "
      "its --address, --port and SHOAL_SECRET");
  const auto json = std::make_shared<std::string>();
  command->add_option("--json", *json, "write ranks, exit code and seconds as JSON to this file at the end");
  command->add_option("program", options->command, "program and its arguments, after --")->required();
  command->callback([options, elastic, json, &program, &chosen] {
    options->command = program;
    if (options->flight_recorder.empty()) {
      options->flight_recorder = process_environment()("SHOAL_FLIGHT_RECORDER").value_or("");
    }
    read_elastic(*elastic, *options);
    options->validate();
    require_known_address(*options);
    require_not_standard_output("--json", *json);  // it has the output of the ranks
    require_writable_folder("--flight-recorder", options->flight_recorder);
    require_writable_file("--json", *json);
    require_no_rank_file("--json", *json, options->flight_recorder, ".flight");
    chosen = [options, json] {
      const auto start = std::chrono::steady_clock::now();
      const auto report = [&](int code) {
        const std::chrono::duration<double> duration = std::chrono::steady_clock::now() - start;
        if (json->empty()) return;
        write_json(*json, {{"ranks", options->ranks}, {"exit_code", code}, {"seconds", duration.count()}});
      };
      try {
        const int code = launch(*options);
        report(code);
        return code;
      } catch (const UsageError&) {  // among others, the program cannot be started
        report(failed);
        throw;
      }
    };
  });
}

}  // namespace shoal::cli
