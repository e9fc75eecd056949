#include "launch/launcher.h"

#include <algorithm>

#include "base/environment.h"
#include "comm/rendezvous/job_identity.h"
#include "launch/job.h"
#include "launch/limits.h"

namespace shoal {

int launch(const LaunchOptions& options) {
  options.validate();
  auto how = options;
  int first_ranks = options.ranks * options.nodes;
  if (options.join) {
    const auto environment = process_environment();
    const JobIdentity identity(environment("SHOAL_JOB_ID").value_or(name_of_job(options.address, options.port)),
                               environment("SHOAL_SECRET").value_or(""));
    constexpr int seconds_to_find_it = 30;
    const auto job = JobStore::find(options.address, options.port, identity, seconds_to_find_it);
    how.node = job.node;
    how.nodes = job.node + 1;
    how.most_ranks = job.most_ranks;
    how.min_ranks = job.min_ranks;
    first_ranks = job.first_ranks;
  }
  const int restarts = std::min(how.max_restarts, JoinTable::most_members);  // there are no more numbers
  require_open_files(std::max(how.ranks, how.most_ranks) + restarts);
  return Job(how, first_ranks).run();
}

}  // namespace shoal
