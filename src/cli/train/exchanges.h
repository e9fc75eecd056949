#pragma once
// Reports on exchanges between neighbours.

#include <string>
#include <utility>
#include <vector>

#include "shoal/training.h"

namespace shoal::cli {

// For the progress line; empty if no exchange was missed.
std::string missed_exchanges(const TrainingCore& training);
// For the report; empty for strategies without such exchanges. Collective.
std::vector<std::pair<std::string, double>> exchange_figures(TrainingCore& training);

}  // namespace shoal::cli
