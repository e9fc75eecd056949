#include "elastic/told.h"

#include <fmt/format.h>

#include <cstdio>
#include <fstream>

#include "comm/group/group_state.h"

namespace shoal {

void tell(const ElasticChange& change, const ElasticOptions& options, int rank, const Group& former) {
  note(former, change.text());
  if (rank == 0 && !options.metrics.empty()) {
    std::ofstream file(options.metrics, std::ios::app);
    file << change.metrics_line() + '\n' << std::flush;
    if (!file) fmt::print(stderr, "shoal: cannot write {}\n", options.metrics);
  }
  if (options.on_change) {
    options.on_change(change);
  } else if (rank == 0) {
    fmt::print(stderr, "shoal: {}\n", change.text());
  }
}

}  // namespace shoal
