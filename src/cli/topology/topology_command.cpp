// Command `shoal topology`: which ranks mix with which, and how fast they reach consensus.

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <optional>

#include "cli/commands.h"
#include "cli/topology/drawing.h"
#include "cli/topology/words.h"
#include "cli/train/report.h"
#include "cli/writable.h"
#include "shoal/error.h"

namespace shoal::cli {
namespace {

struct TopologyOptions {
  bool list = false;
  std::string name;
  std::string file;
  std::optional<int> ranks;
  std::optional<int> local_size;
  std::optional<uint64_t> seed;
  std::string html;
  std::string svg;
  std::string json;
};

int list_topologies(const std::string& json) {
  if (!json.empty()) {
    auto list = nlohmann::ordered_json::array();
    for (const auto& [name, summary] : known_topologies()) list.push_back({{"name", name}, {"summary", summary}});
    write_json(json, list);
  }
  if (json == "-") return 0;
  for (const auto& [name, summary] : known_topologies()) fmt::print("{:<22}{}\n", name, summary);
  return 0;
}

// No output may replace another one, or the file that is read.
void check_outputs(const TopologyOptions& options) {
  require_not_standard_output("--html", options.html);
  require_not_standard_output("--svg", options.svg);
  require_two_files("--html", options.html, "--svg", options.svg);
  require_two_files("--html", options.html, "--json", options.json);
  require_two_files("--svg", options.svg, "--json", options.json);
  if (options.file.empty()) return;
  require_not_read("--html", options.html, {options.file});
  require_not_read("--svg", options.svg, {options.file});
  require_not_read("--json", options.json, {options.file});
}

void check(const TopologyOptions& options) {
  if (options.list) {
    const bool others = options.ranks || options.local_size || options.seed || !options.name.empty() ||
                        !options.file.empty() || !options.html.empty() || !options.svg.empty();
    if (others) throw UsageError("--list takes no other option than --json, and no name");
    return;
  }
  if (options.name.empty() == options.file.empty()) {
    throw UsageError("give the name of a topology or --file FILE (shoal topology --list)");
  }
  if (options.name.empty()) {
    if (options.local_size) throw UsageError("--local-size is for named topologies, not for --file");
    if (options.seed) throw UsageError("--seed is for named topologies, not for --file");
  } else if (!options.ranks) {
    throw UsageError(fmt::format("topology {}: give --ranks N", options.name));
  } else if (options.seed && options.name != "random") {
    throw UsageError(fmt::format("--seed is for topology random, not for {}", options.name));
  }
}

Topology find(const TopologyOptions& options) {
  if (options.file.empty()) {
    return make_topology(options.name, *options.ranks, options.local_size.value_or(1), options.seed.value_or(0));
  }
  auto topology = read_topology(options.file);
  if (options.ranks && *options.ranks != topology.size()) {
    throw UsageError(
        fmt::format("--ranks {}: topology file {} is for {} ranks", *options.ranks, options.file, topology.size()));
  }
  return topology;
}

int show(const TopologyOptions& options, const Topology& topology) {
  const auto report = topology.report();
  if (!options.html.empty()) write_text(options.html, topology_page(topology, report));
  if (!options.svg.empty()) write_text(options.svg, rounds_drawing(topology));
  if (options.json != "-") fmt::print("{}", in_words(topology, report));
  if (!options.json.empty()) write_json(options.json, to_json(topology, report));
  return 0;
}

}  // namespace

void add_topology_command(CLI::App& app, Action& chosen) {
  auto* command =
      app.add_subcommand("topology", "show the graph and the convergence of a topology for decentralised training");
  const auto options = std::make_shared<TopologyOptions>();
  command->add_option("name", options->name, "name of a topology, see --list");
  command->add_flag("--list", options->list, "list the topologies, and do nothing else");
  command->add_option("--file", options->file, "read the topology from this JSON file (docs/topologies.md)");
  command->add_option("--ranks", options->ranks, "number of ranks (with --file: as in the file)");
  command->add_option("--local-size", options->local_size,
                      "ranks per host, for topologies that depend on hosts (default: 1)");
  command->add_option("--seed", options->seed, "seed of topology random (default: 0)");
  command->add_option("--html", options->html, "write an HTML page with drawings to this file");
  command->add_option("--svg", options->svg, "write a drawing of the rounds to this file");
  command->add_option("--json", options->json, "write rounds and figures as JSON to this file; - is standard output");
  command->callback([options, &chosen] {
    check(*options);
    if (options->list) {
      chosen = [json = options->json] { return list_topologies(json); };
      return;
    }
    check_outputs(*options);
    const auto topology = std::make_shared<Topology>(find(*options));
    chosen = [options, topology] { return show(*options, *topology); };
  });
}

}  // namespace shoal::cli
