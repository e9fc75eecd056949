#pragma once
// What is said of exchanges between neighbours.

#include <string>
#include <utility>
#include <vector>

#include "shoal/training.h"

namespace shoal::cli {

// For the progress line: empty, if all came in time.
std::string missed_exchanges(const TrainingCore& training);
// For the report; none without such exchanges. Collective.
std::vector<std::pair<std::string, double>> exchange_figures(TrainingCore& training);

}  // namespace shoal::cli
