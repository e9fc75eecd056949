#include "cli/launch/ranks.h"

#include <ATen/Parallel.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <system_error>

#include "base/environment.h"
#include "cli/exit_code.h"

namespace shoal::cli {

namespace {

bool has_one_thread() {
  std::error_code unreadable;
  const std::filesystem::directory_iterator tasks("/proc/self/task", unreadable);
  return !unreadable && std::distance(begin(tasks), end(tasks)) == 1;
}

}  // namespace

int launch_ranks(LaunchOptions how, const std::vector<std::string>& line, const std::function<int()>& rank) {
  if (has_one_thread()) {
    how.body = [&rank, threads = how.threads] {
      std::signal(SIGXFSZ, SIG_IGN);                  // as in main()
      if (threads > 0) at::set_num_threads(threads);  // OpenMP has read its variable already
      return exit_code_of(rank);
    };
  } else {
    how.command = line;
  }
  return launch(how);
}

Placement find_place(const std::optional<int>& ranks) {
  // Ranks would inherit it. Those of a job of several nodes do not belong on the first one alone.
  if (ranks && in_batch_script_of_one_node(process_environment())) unsetenv("SLURM_PROCID");
  return find_placement({}, process_environment());
}

}  // namespace shoal::cli
