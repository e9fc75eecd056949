#include "elastic/change_report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstdio>
#include <fstream>

#include "base/print_to_stderr.h"
#include "comm/group/group_state.h"

namespace shoal {

std::string taken_over(const ElasticParts& parts, const GlobalBatch& batch, const World& world,
                       int64_t updated_before) {
  auto text = parts.in_place_of_lost();
  if (parts.sharded()) {
    text += fmt::format(": rank {} updates {} elements, and updated {}", world.rank(), parts.updated_elements(),
                        updated_before);
  }
  if (batch.size() == 0) return text;
  std::vector<int64_t> slices;
  for (int rank = 0; rank < world.size(); ++rank) slices.push_back(batch.shares_of(rank));
  return text +
         fmt::format("; of {} slices of the batch, the ranks compute {}", batch.shares(), fmt::join(slices, ", "));
}

void report_change(const ElasticChange& change, const ElasticOptions& options, int rank, const Group& former) {
  note(former, change.text());  // which leaves no room for more
  if (!change.taken_over.empty()) note(former, change.taken_over);
  if (rank == 0 && !options.metrics.empty()) {
    std::ofstream file(options.metrics, std::ios::app);
    file << change.metrics_line() + '\n' << std::flush;
    if (!file) print_to_stderr("shoal: cannot write {}\n", options.metrics);
  }
  if (options.on_change) {
    options.on_change(change);
  } else if (rank == 0) {
    print_to_stderr("shoal: {}\n", change.text());
  }
}

}  // namespace shoal
