#pragma once
// Analysis of the flight recorder files of all ranks: which rank waits for which.

#include <string>
#include <vector>

#include "comm/telemetry/flight_reader.h"

namespace shoal {

// Sentences, the likeliest cause first, followed by other anomalies; never empty. flights: of one job, by rank.
std::vector<std::string> verdict(const std::vector<Flight>& flights);

// "#118 all_reduce(sum, 2360 x Float), step 39, bucket 3: layer4.weight"
std::string describe(const Flight::Record& record);

}  // namespace shoal
