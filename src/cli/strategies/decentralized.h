#pragma once
// `shoal train --strategy decentralized`.

#include "cli/strategies/strategies.h"
#include "shoal/decentralized.h"

namespace shoal::cli {

// Of --topology or --topology-file, for so many ranks.
Topology topology_of(const TrainOptions& options, int size, int local_size);
// Throws UsageError where so many ranks cannot train so.
void check_decentralized(const TrainOptions& options, int ranks);
// The lowest number of those that have not been removed.
int first_of_those_left(const ExchangeStatistics& seen);
// For the progress line: empty, if all came in time.
std::string missed_exchanges(const ExchangeStatistics& seen);
// For the report.
std::vector<std::pair<std::string, double>> exchange_figures(const ExchangeStatistics& seen, double consensus_distance);

// See make_strategy.
std::unique_ptr<Strategy> make_decentralized(const TrainOptions& options, const std::shared_ptr<models::Model>& model,
                                             const Group& group, int64_t total_steps);

}  // namespace shoal::cli
