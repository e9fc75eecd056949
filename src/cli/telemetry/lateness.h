#pragma once
// State and lateness of each rank, from flight recorders.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "comm/telemetry/flight_reader.h"

namespace shoal::cli {

struct RankView {
  int rank = 0;
  std::string state{};      // "running", "stopped", "failed", ...
  int64_t step = -1;        // the highest that its records name; -1: none does
  std::string operation{};  // the last one; empty: none
  double waiting_s = 0;     // since it entered that operation, if it has not finished
  // Behind the first rank when it enters operations, mean; none: there are none to compare.
  std::optional<double> late_ms{};
};

// By rank. `flights`: of one job.
std::vector<RankView> rank_views(const std::vector<Flight>& flights);

// "running", "stopped", "gone", "failed", "left in order" or "on another host".
std::string state_in_words(const Flight& flight);

}  // namespace shoal::cli
