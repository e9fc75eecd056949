#pragma once
// Options of strategies that mix with neighbours.

#include "shoal/strategy.h"
#include "shoal/topology.h"

namespace shoal {

// dtypes: choices for exchange_dtype.
std::vector<StrategyOption> topology_option_list(const std::string& local_size_help, std::vector<std::string> dtypes);
// StrategyOptionError for options that exclude each other.
void check_topology_options(const OptionValues& values);
// size: number of ranks, or of hosts.
Topology topology_of(const OptionValues& values, const TrainingOptions& options, int size, int local_size);
// The lowest rank that has not been removed.
int first_of_those_left(const ExchangeStatistics& seen);

}  // namespace shoal
