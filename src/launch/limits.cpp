#include "launch/limits.h"

#include <fmt/format.h>
#include <sys/resource.h>

#include "shoal/error.h"

namespace shoal {
namespace {

rlim_t limit_of(__rlimit_resource_t resource) {
  rlimit limit{};
  return getrlimit(resource, &limit) == 0 ? limit.rlim_cur : RLIM_INFINITY;
}

}  // namespace

void require_open_files(int ranks) {
  // Measured: 25 files for the launcher's streams, signals, watcher and store; per rank two pipes and a connection.
  const auto least = static_cast<rlim_t>(28 + 3 * ranks);
  const auto limit = limit_of(RLIMIT_NOFILE);
  if (limit >= least) return;
  throw UsageError(
      fmt::format("a process may have {} files open here, and {} ranks need {} at least; raise the limit "
                  "(ulimit -n)",
                  limit, ranks, least));
}

void require_file_size(std::size_t bytes) {
  const auto limit = limit_of(RLIMIT_FSIZE);
  if (limit >= bytes) return;
  throw UsageError(
      fmt::format("a file may have {} bytes here, and memory that ranks share has {} at least; raise the limit (ulimit "
                  "-f), or use transport tcp",
                  limit, bytes));
}

}  // namespace shoal
