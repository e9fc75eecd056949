#include "cli/strategies/strategy_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "shoal/error.h"

namespace shoal::cli {
namespace {

using Names = std::vector<std::string>;

struct Scope {
  Names strategies;
  Names options;
};

const Names with_topology{"decentralized", "hybrid_gossip"};

const std::vector<Scope>& scopes() {
  static const std::vector<Scope> list{
      {with_topology,
       {"--topology", "--topology-file", "--topology-local-size", "--exchange-dtype", "--neighbour-timeout"}},
      {{"ddp", "zero1", "decentralized", "hybrid_gossip"}, {"--bucket-cap-mb"}},
      {{"ddp", "zero1"}, {"--first-bucket-mb", "--find-unused-parameters", "--static-graph", "--no-bucket-view"}},
      {{"local_sgd", "slowmo", "diloco"}, {"--sync-every", "--fragments", "--sync-delay", "--reduce-dtype"}},
      {{"slowmo", "diloco"}, {"--outer-lr", "--outer-momentum"}},
      {{"ddp"}, {"--optimizer-in-backward"}},
      {{"ddp", "zero1", "zero2", "megatron", "fsdp", "fsdp_grad_op", "hybrid", "decentralized", "hybrid_gossip"},
       {"--logging-data"}}};
  return list;
}

bool among(const Names& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

bool given(const CLI::App& command, const std::string& option) {
  return command.get_option(option)->count() > 0;
}

}  // namespace

bool has_topology(const std::string& strategy) {
  return among(with_topology, strategy);
}

void refuse_foreign_options(const CLI::App& command, const TrainOptions& options) {
  for (const auto& scope : scopes()) {
    if (among(scope.strategies, options.strategy)) continue;
    for (const auto& option : scope.options) {
      if (!given(command, option)) continue;
      throw UsageError(fmt::format("{}: --strategy {} does not have it; it is for {}", option, options.strategy,
                                   fmt::join(scope.strategies, ", ")));
    }
  }
  if (options.topology_file.empty()) return;
  if (given(command, "--topology")) throw UsageError("--topology and --topology-file: give one of them");
  if (options.strategy == "decentralized" && given(command, "--topology-local-size")) {
    throw UsageError("--topology-local-size: is for topologies by name, not for --topology-file");
  }
}

}  // namespace shoal::cli
