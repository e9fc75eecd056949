#include "training/topology_options.h"

#include <fmt/format.h>

#include <algorithm>

namespace shoal {

std::vector<StrategyOption> topology_option_list(const std::string& local_size_help, std::vector<std::string> dtypes) {
  return {
      {.name = "topology", .default_value = "one-peer-exp", .help = "name of the topology; see shoal topology --list"},
      {.name = "topology_file", .help = "read the topology from this JSON file instead"},
      {.name = "topology_local_size",
       .type = StrategyOption::Type::integer,
       .default_value = "1",
       .help = local_size_help,
       .minimum = 1},
      {.name = "exchange_dtype",
       .default_value = "float32",
       .help = "format of the exchange (compressed differences: int8, top_k, 1 % of the elements)",
       .choices = std::move(dtypes)},
      {.name = "neighbour_timeout",
       .type = StrategyOption::Type::number,
       .default_value = "5",
       .help = "seconds after which a late neighbour is left out"},
      {.name = "bucket_cap_mb",
       .type = StrategyOption::Type::number,
       .default_value = "25",
       .help = "MiB of parameters per exchange"}};
}

void check_topology_options(const OptionValues& values) {
  constexpr double years = 1e8;  // a longer time would overflow the clock
  const double timeout = values.number("neighbour_timeout");
  if (!(timeout > 0 && timeout <= years)) {
    throw StrategyOptionError("neighbour_timeout",
                              fmt::format(" {}: give seconds above 0, up to 1e8", values.text("neighbour_timeout")));
  }
  if (!values.text("topology_file").empty() && values.given("topology")) {
    throw StrategyOptionError("topology_file", ": in place of topology; give one of them");
  }
}

Topology topology_of(const OptionValues& values, const TrainingOptions& options, int size, int local_size) {
  const auto& file = values.text("topology_file");
  if (!file.empty()) return read_topology(file);
  return make_topology(values.text("topology"), size, local_size, options.seed);
}

int first_of_those_left(const ExchangeStatistics& seen) {
  int first = 0;
  while (std::count(seen.removed.begin(), seen.removed.end(), first) > 0) ++first;
  return first;
}

}  // namespace shoal
